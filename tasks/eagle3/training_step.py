"""One training step's loss: the numbers of speculators' forward, without the work nobody needs.

A row is computed at a TTT step only if a supervised target depends on it; the embedding's half of
the projections is done once for all steps; norm gains are folded into the matrices behind them, so
that frozen inputs need no gradient; head and loss run at supervised rows, all steps together.

T = packed rows, K = TTT steps, N_k = query rows of step k, M = rows with step-0 keys, H = hidden
size, A = captured layers, C = head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tasks.eagle3.batches import PackedBatch
from tasks.eagle3.draft import Eagle3DraftModel, eager_loss
from tasks.eagle3.draft_layer import DraftLayer, LayerMemory, Rotation
from tasks.eagle3.flash_attention import can_flash
from tasks.eagle3.folded import fold
from tasks.eagle3.head import centered
from tasks.eagle3.head_transform import PLAIN, HeadTransform
from tasks.eagle3.loss import REDUCTION_EPS, LossInputs, ttt_loss
from tasks.eagle3.row_ops import normalize, select_rows
from tasks.eagle3.step_plan import StepPlan, StepRows, plan_steps

Precision = Literal["fp32", "bf16"]
"""`fp32`: products in the parameters' own dtype. `bf16`: products in bf16; weights, residual
stream, softmax and loss stay fp32."""


class StepResult(NamedTuple):
    """A batch's loss and what was counted on the way."""

    loss: Tensor  # scalar, with gradient
    metrics: dict[str, Tensor]  # `<name>_sum` and `<name>_total`: add up over batches, then divide


@dataclass(frozen=True)
class FrozenHeads:
    """The draft's and the verifier's head as the products read them, [D, H] each; one tensor where they are one."""

    draft: Tensor
    verifier: Tensor


def frozen_heads(draft: Eagle3DraftModel, precision: Precision) -> FrozenHeads:
    """Convert the two heads, which no step changes, on the device of what trains."""
    own, verifier = draft.lm_head.weight.detach(), draft.verifier_lm_head.weight.detach()
    converted = own.to(draft.fc.weight.device, _dtype(draft, precision))
    if own.data_ptr() == verifier.data_ptr():
        return FrozenHeads(converted, converted)
    return FrozenHeads(converted, verifier.to(converted))


def plan_batch(
    draft: Eagle3DraftModel, batch: PackedBatch, *, ttt_steps: int, precision: Precision = "fp32"
) -> StepPlan:
    """The batch's plan, made on the host: do it while the batch is still there.

    With an embedding on the host, the rows that the step needs of it are in the plan.
    """
    attention: Any = draft.layers[0].self_attn
    plan = plan_steps(
        batch.loss_mask,
        batch.document_ids,
        ttt_steps=ttt_steps,
        num_layers=len(draft.layers),
        sequences=can_flash(
            draft.fc.weight.device, _dtype(draft, precision), head_width=attention.head_dim
        ),
    )
    table = draft.embed_tokens.weight.detach()
    if table.device.type != "cpu":
        return plan
    tokens = batch.input_ids.cpu().index_select(0, plan.key_embeds)
    pinned = draft.fc.weight.device.type == "cuda"
    rows = torch.empty(len(tokens), table.shape[1], dtype=table.dtype, pin_memory=pinned)
    return replace(plan, embeds=torch.index_select(table, 0, tokens, out=rows))


def training_forward(
    draft: Eagle3DraftModel,
    batch: PackedBatch,
    *,
    ttt_steps: int,
    loss: str = "kl_div",
    step_loss_decay: float = 1.0,
    precision: Precision = "fp32",
    plan: StepPlan | None = None,
    transform: HeadTransform = PLAIN,
    heads: FrozenHeads | None = None,
    counts: Sequence[int] | None = None,
) -> StepResult:
    """Loss (with gradient) and metrics of a batch on the draft's device.

    Equals `Eagle3DraftModel.forward` of speculators 0.9.0 in loss, metrics and every gradient.
    Under `torch.no_grad()` nothing is kept for a backward. `plan` is `plan_batch`'s for this batch
    (without it the step waits for the mask to come from the device). `transform` is the verifier's: its kind of
    norm and its soft-cap, which speculators does not know, decide the targets (its scale is in the heads). `heads`
    saves their conversion at every step. `counts` are the supervised rows of each TTT step that the loss is a mean
    over, where the batch is a part of more: loss and metrics then are its share, to be summed with the others'.
    Raises ValueError for unknown losses, for batches without supervision, and for drafts with
    features that the step does not compute.
    """
    _check_draft(draft)
    loss_function = None if loss == "kl_div" else eager_loss(loss)
    plan = plan or plan_batch(draft, batch, ttt_steps=ttt_steps, precision=precision)
    if len(plan.steps) != ttt_steps or plan.rows != len(batch):
        raise ValueError(
            f"the plan is for {plan.rows} rows and {len(plan.steps)} steps, the batch has "
            f"{len(batch)} rows and {ttt_steps} steps; plan each batch anew"
        )
    device = draft.fc.weight.device
    plan = plan.to(device)
    counts = counts or plan.supervised
    dtype = _dtype(draft, precision)
    hidden = _run_steps(draft, batch, plan, dtype)  # [sum of N_k, H]
    targets = batch.last.index_select(0, plan.targets).to(draft.fc.weight.dtype)  # [U, H]
    with torch.no_grad():
        target_states = draft.verifier_norm(centered(targets, transform)).to(dtype)
    heads = heads or frozen_heads(draft, precision)
    inputs = LossInputs(
        head=heads.draft,
        target_head=heads.verifier,
        target_states=target_states,
        scored=plan.scored,
        factors=_factors(plan, counts, step_loss_decay),
        loss_function=loss_function,
        transform=transform,
    )
    total, step_losses, matches = ttt_loss(hidden, inputs=inputs)
    metrics = _metrics(total.detach(), step_losses, matches, plan, batch.loss_mask, counts)
    return StepResult(loss=total, metrics=metrics)


def expected_acceptance_length(metrics: Mapping[str, Tensor | float]) -> float:
    """Tokens that a round of drafting is expected to yield, from summed metrics.

    1 + the sum over steps of the product of the conditional accuracies so far: the verifier's own
    token plus each drafted one whose predecessors were right too.
    """
    length, reach, k = 1.0, 1.0, 0
    while f"cond_acc_{k}_sum" in metrics:
        total = float(metrics[f"cond_acc_{k}_total"])
        reach *= float(metrics[f"cond_acc_{k}_sum"]) / total if total else 0.0
        length += reach
        k += 1
    return length


def _factors(plan: StepPlan, counts: Sequence[int], decay: float) -> Tensor:
    """What each score counts in the loss, [U, K]: speculators' mean over a step's rows, times decay ** k."""
    scales = [decay**k / (count + REDUCTION_EPS) for k, count in enumerate(counts)]
    # not made on the device: that would wait for all that it has to do
    on_device = torch.tensor(scales, dtype=torch.float64).to(plan.weights.device, non_blocking=True)
    return plan.weights * on_device


def _dtype(draft: Eagle3DraftModel, precision: Precision) -> torch.dtype:
    """What products are computed in."""
    return torch.bfloat16 if precision == "bf16" else draft.fc.weight.dtype


@dataclass
class _Unrolled:
    """The draft unrolled over the steps of one batch."""

    draft: Eagle3DraftModel
    batch: PackedBatch
    plan: StepPlan
    layers: list[DraftLayer]
    memories: list[LayerMemory]
    embeds: tuple[Tensor, Tensor]  # [., Q * C] and [., 2 * V * C]

    def step(self, k: int, hidden: Tensor) -> Tensor:
        """All layers of one step: [M, H] (step 0) or [N_k, H] in, [N_k, H] out."""
        plan = self.plan
        tables = self.draft.rotary_emb(hidden, (self.batch.position_ids + k)[None])
        cos, sin = (table[0] for table in tables)  # [T, C]
        key_rows = plan.steps[k].positions if k else plan.key_rows
        key_embeds = plan.steps[k].key_embeds if k else plan.key_rows_in_embeds
        last = len(self.layers) - 1
        for index, (layer, memory) in enumerate(zip(self.layers, self.memories, strict=True)):
            # At step 0 a layer below the last is needed wherever the next one has keys.
            everywhere = plan.all_rows if k == 0 and index < last else None
            rows = everywhere or plan.steps[k]
            embeds = None
            if index == 0:
                embeds = (
                    select_rows(self.embeds[0], rows.query_embeds),
                    select_rows(self.embeds[1], key_embeds),
                )
            hidden = layer(
                hidden,
                queries=None if k or everywhere else rows.from_previous,
                embeds=embeds,
                rotation=Rotation(
                    query_cos=cos[rows.positions],
                    query_sin=sin[rows.positions],
                    key_cos=cos[key_rows],
                    key_sin=sin[key_rows],
                ),
                memory=memory,
                visible=rows.visible,
            )
        return hidden

    def narrow(self, hidden: Tensor, rows: StepRows) -> Tensor:
        """Leave behind what the next step does not need."""
        for memory in self.memories:
            memory.keep(rows.from_previous)
        return select_rows(hidden, rows.from_previous)


def _run_steps(
    draft: Eagle3DraftModel, batch: PackedBatch, plan: StepPlan, dtype: torch.dtype
) -> Tensor:
    """The rows that the head reads, of all steps one after the other: [sum of N_k, H]."""
    layers = [
        DraftLayer(layer, first=index == 0, dtype=dtype) for index, layer in enumerate(draft.layers)
    ]
    unrolled = _Unrolled(
        draft=draft,
        batch=batch,
        plan=plan,
        layers=layers,
        memories=[LayerMemory() for _ in layers],
        embeds=_project_embeds(draft, layers[0], batch, plan),
    )
    hidden = _project_aux(draft, batch.aux.index_select(0, plan.key_rows), dtype)  # [M, H]
    outputs: list[Tensor] = []
    for k, rows in enumerate(plan.steps):
        hidden = unrolled.step(k, unrolled.narrow(hidden, rows) if k else hidden)  # [N_k, H]
        if draft.config.norm_output:
            hidden = _final_norm(draft, hidden)
        outputs.append(hidden)
    together = torch.cat(outputs)
    return together if draft.config.norm_output else _final_norm(draft, together)


def _project_embeds(
    draft: Eagle3DraftModel, layer: DraftLayer, batch: PackedBatch, plan: StepPlan
) -> tuple[Tensor, Tensor]:
    """The frozen embeddings' part of the first layer's projections, for all steps."""
    with torch.no_grad():
        rows = plan.embeds  # [E, H]
        if rows is None:
            rows = draft.embed_tokens(batch.input_ids.index_select(0, plan.key_embeds))
        normed = normalize(rows, eps=layer.eps, dtype=layer.dtype)
        at = torch.searchsorted(plan.key_embeds, plan.query_embeds)
        for_queries = normed if len(at) == len(normed) else normed.index_select(0, at)
    return layer.project_embeds(for_queries, normed)


def _project_aux(draft: Eagle3DraftModel, aux: Tensor, dtype: torch.dtype) -> Tensor:
    """Captured states [M, A * H] to the draft's input [M, H], gains of the norms in the matrix."""
    weight, gain = draft.fc.weight, None
    if draft.input_norm is not None:
        norm: Any = draft.input_norm
        aux = normalize(aux.to(weight.dtype), eps=norm.variance_epsilon, dtype=dtype)
        gain = norm.weight
    if draft.fc_norm is not None:
        norms: list[Any] = list(draft.fc_norm)
        by_layer = aux.to(weight.dtype).view(len(aux), len(norms), -1)  # [M, A, H]
        aux = normalize(by_layer, eps=norms[0].variance_epsilon, dtype=dtype).flatten(1)
        gain = torch.cat([norm.weight for norm in norms])
    (projection,) = fold([weight], [gain], dtype=dtype)
    return projection.linear(aux.to(dtype)).to(weight.dtype)


def _final_norm(draft: Eagle3DraftModel, hidden: Tensor) -> Tensor:
    norm: Any = draft.norm
    scaled: Tensor = normalize(hidden, eps=norm.variance_epsilon, dtype=hidden.dtype) * norm.weight
    return scaled


@torch.no_grad()
def _metrics(  # noqa: PLR0917 - what the step has, in the order in which it comes
    total: Tensor,
    step_losses: Tensor,
    matches: Tensor,
    plan: StepPlan,
    loss_mask: Tensor,
    counts: Sequence[int],
) -> dict[str, Tensor]:
    """Sums and counts by speculators' rules; a row's later steps count while it is right so far."""
    steps = len(plan.steps)
    one = torch.ones_like(total)
    by_target = matches.new_zeros(plan.rows, steps).index_copy_(0, plan.targets, matches)
    right_so_far = loss_mask.clone()  # [T], at the row where the drafting starts
    # what a loss is worth in a mean: 1, or the batch's part of what is trained on at once
    shares = [
        own / every if every else 1.0 for own, every in zip(plan.supervised, counts, strict=True)
    ]
    metrics = {"loss_sum": total.clone(), "loss_total": one * shares[0]}
    for k in range(steps):
        starts = max(plan.rows - k, 0)
        candidates = right_so_far[:starts]
        cond_total = candidates.sum().to(total.dtype)
        candidates &= by_target[k:, k]
        correct = (candidates & loss_mask[k:]).sum().to(total.dtype)
        metrics[f"loss_{k}_sum"], metrics[f"loss_{k}_total"] = step_losses[k], one * shares[k]
        metrics[f"full_acc_{k}_sum"] = correct
        metrics[f"full_acc_{k}_total"] = one * plan.supervised[k]
        metrics[f"cond_acc_{k}_sum"] = correct
        metrics[f"cond_acc_{k}_total"] = cond_total
    return metrics


def _check_draft(draft: Eagle3DraftModel) -> None:
    if draft.uses_sliding_window_attn:
        raise ValueError("the draft has sliding-window layers; the training step attends fully")
    if draft.config.embed_requires_grad:
        raise ValueError("embed_requires_grad is set; the training step keeps embeddings frozen")
