"""The draft model: speculators' Eagle3DraftModel, built from tensors and saved for vLLM.

This is the one module behind which speculators lies: what other modules need of it is re-exported.

V = verifier vocabulary, D = draft vocabulary, H = hidden size, A = captured layers.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.layer_config import LayerConfig, derived_layer

__all__ = [
    "LOSS_NAMES",
    "DraftSettings",
    "Eagle3DraftModel",
    "Eagle3SpeculatorConfig",
    "build_draft",
    "draft_config",
    "eager_loss",
    "load_speculator",
    "save_speculator",
    "trainable_parameters",
    "trainable_shapes",
]

LOSS_NAMES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
"""Names of speculators' losses (speculators/losses/utils.py, 0.9.0)."""

_CONFIG_CLASSES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
}


def draft_config(
    text_config: dict[str, Any],
    *,
    draft_vocab_size: int,
    layer_ids: Sequence[int],
    settings: DraftSettings,
    verifier_name_or_path: str,
    verifier_architectures: Sequence[str],
    draft_tokens: int,
    layer: LayerConfig | None = None,
) -> Eagle3SpeculatorConfig:
    """The speculator's config around one or two decoder layers.

    `text_config` is the verifier's resolved text config as a dict (the one with `hidden_size`);
    `layer` is what `plan_draft` made of it, else the layers are derived from it here.
    Raises ValueError when the widths contradict each other or the draft vocabulary is too large.
    """
    vocab_size = int(text_config["vocab_size"])
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size {draft_vocab_size} is not in 1..{vocab_size}, the verifier's "
            "vocabulary; lower it"
        )
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(f"layer ids {list(layer_ids)} are empty or repeat; name each layer once")
    values = dict(layer or derived_layer(text_config, settings))
    config = _CONFIG_CLASSES[values.pop("model_type")](
        **values,
        attention_bias=False,
        # vLLM's llama draft reads its number of captured layers here (0.32, llama_eagle3.py)
        num_aux_hidden_states=len(layer_ids),
        tie_word_embeddings=False,
    )
    # Never left to a default: speculators' flex attention has no backward on a CPU.
    config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=draft_tokens)
    return Eagle3SpeculatorConfig(
        transformer_layer_config=config,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=verifier_name_or_path, architectures=list(verifier_architectures)
            ),
        ),
    )


def build_draft(
    config: Eagle3SpeculatorConfig,
    *,
    embed: Tensor,
    norm: Tensor,
    head: Tensor,
    t2d: Tensor,
    d2t: Tensor,
    seed: int,
    logit_scale: float = 1.0,
    device: torch.device | None = None,
    tables: torch.device | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Eagle3DraftModel:
    """A draft around the verifier's own tensors, its trainable part in fp32: `weights` by name, or drawn from `seed`.

    `embed` [V, H], `norm` [H] (the final norm), `head` [V, H], `t2d` [V] bool, `d2t` [D] offsets
    (target_id = draft_id + d2t[draft_id]). Both heads are frozen and become one copy of
    `head[t2d] * logit_scale` in fp32; a 16-bit `embed` is kept as it is, and on its own device not copied.
    The draft lies on `device` (default: the CPU), its embedding and heads on `tables` (default: there too).
    The global random state is left as it was.
    Raises ValueError when tensors, vocabulary map or weights are not those of this config.
    """
    device = device or torch.device("cpu")
    tables = tables or device
    _check_shapes(config, embed=embed, norm=norm, head=head)
    check_vocab_map(t2d, d2t, draft_vocab_size=config.draft_vocab_size)
    with torch.device("meta"):  # shapes alone: nothing is drawn that is replaced below
        model = Eagle3DraftModel(config)
    kept = embed.dtype if embed.itemsize == 2 else torch.float32
    draft_head = head[t2d.to(head.device, torch.bool)].to(tables, torch.float32)  # [D, H]
    draft_head.mul_(logit_scale)
    tensors = {
        "embed_tokens.weight": embed.to(tables, kept),
        "lm_head.weight": draft_head,
        "verifier_lm_head.weight": draft_head,
        "verifier_norm.weight": norm.to(device, torch.float32, copy=True),
    }
    for name, tensor in tensors.items():
        _check_finite(name, tensor)
    if model.d2t is not None:
        tensors |= {"t2d": t2d.to(device, torch.bool), "d2t": d2t.to(device, torch.long)}
    trainable = trainable_parameters(model)
    if weights is None:
        std = config.transformer_layer_config.initializer_range
        tensors |= _draw(trainable, seed=seed, std=std, device=device)
    else:
        check_weights(weights, trainable)
        tensors |= {name: w.to(device, torch.float32) for name, w in weights.items()}
    model.load_state_dict(tensors, assign=True)
    rotary = model.rotary_emb  # its table is no parameter, and was made on the meta device
    model.rotary_emb = type(rotary)(rotary.config).to(device)
    return model


def check_weights(weights: Mapping[str, Tensor], trainable: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` are exactly the trainable tensors, by name and shape."""
    differing = sorted(weights.keys() ^ trainable.keys())
    if differing:
        raise ValueError(f"trained tensors and draft differ: {differing[:4]}")
    for name, weight in weights.items():
        if weight.shape != trainable[name].shape:
            raise ValueError(
                f"{name} has shape {list(weight.shape)}, the draft's is {list(trainable[name].shape)}; "
                "the weights are another draft's"
            )


def trainable_parameters(model: Eagle3DraftModel) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter of everything that trains, sorted by name."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return dict(sorted(named.items()))


def trainable_shapes(config: Eagle3SpeculatorConfig) -> dict[str, torch.Size]:
    """Name -> shape of everything that trains in a draft of this config, without making it."""
    with torch.device("meta"):
        model = Eagle3DraftModel(config)
    return {name: value.shape for name, value in trainable_parameters(model).items()}


def save_speculator(
    model: Eagle3DraftModel, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write speculators' own checkpoint: config.json and model.safetensors, as vLLM loads it.

    The model stays as it is; the file holds `dtype` copies of its tensors (ids stay integers).
    """
    with torch.device("meta"):
        copy = Eagle3DraftModel(cast(Eagle3SpeculatorConfig, model.config))
    tensors = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
        for name, value in model.state_dict().items()
    }
    copy.load_state_dict(tensors, assign=True)
    copy.save_pretrained(directory)


def load_speculator(directory: Path, *, attention: str = "eager") -> Eagle3DraftModel:
    """Load a checkpoint by speculators itself, in the dtype of the file, frozen parts frozen.

    speculators reads head and norm from the verifier that the checkpoint names, so that directory
    or hub id must be readable.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = attention
    load = cast(Callable[..., Eagle3DraftModel], Eagle3DraftModel.from_pretrained)
    return load(directory, config=config)


def eager_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """speculators' eager loss of that name: (logits [1, N, D], targets [1, N, D]) -> [1, N]."""
    if name not in LOSS_NAMES:
        raise ValueError(f"loss {name!r} is unknown; choose one of {', '.join(LOSS_NAMES)}")
    function, _ = resolve_loss_config(name, "eager")[name]
    return function


def check_vocab_map(t2d: Tensor, d2t: Tensor, *, draft_vocab_size: int) -> None:
    """Raise ValueError unless `d2t` holds offsets that name each token of `t2d` once, in order."""
    targets = torch.arange(len(d2t)) + d2t.cpu()
    if len(d2t) != draft_vocab_size or not torch.equal(targets, t2d.cpu().nonzero()[:, 0]):
        raise ValueError(
            f"d2t ({len(d2t)} entries) and t2d ({int(t2d.sum())} tokens) do not describe one "
            f"draft vocabulary of {draft_vocab_size}: i + d2t[i] must run through the tokens of "
            "t2d in ascending order; rebuild the vocabulary map (d2t holds offsets, not ids)"
        )


def _check_shapes(
    config: Eagle3SpeculatorConfig, *, embed: Tensor, norm: Tensor, head: Tensor
) -> None:
    layer_config = config.transformer_layer_config
    vocab, hidden = layer_config.vocab_size, layer_config.hidden_size
    expected = {"embed": (vocab, hidden), "norm": (hidden,), "head": (vocab, hidden)}
    for (name, shape), tensor in zip(expected.items(), (embed, norm, head), strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"the verifier's {name} has shape {tuple(tensor.shape)}, its config says {shape}; "
                "the tensors and the config are of different verifiers"
            )


def _draw(
    parameters: Mapping[str, Tensor], *, seed: int, std: float, device: torch.device
) -> dict[str, Tensor]:
    """Norms of ones, matrices from N(0, std), on the CPU, each from a seed of its name: neither order, device nor
    threads are an input.
    """

    def draw(name: str) -> Tensor:
        values = torch.ones(parameters[name].shape)
        if values.dim() > 1:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            values.normal_(0.0, std, generator=generator)
        return values.to(device)

    with ThreadPoolExecutor() as threads:
        return dict(zip(parameters, threads.map(draw, parameters), strict=True))


def _check_finite(name: str, tensor: Tensor) -> None:
    # Both ends are NaN when any value is. No tensor of flags: gigabytes for a large embedding.
    if not all(math.isfinite(end) for end in torch.aminmax(tensor)):
        raise ValueError(f"{name} has non-finite values; check the verifier's tensors")
