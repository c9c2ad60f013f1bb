"""Training step against speculators' own forward, on the shape of a SmolLM2-135M draft.

`python tests/benchmarks/bench_train.py [--quick] [--record]`

Both sides do the same: forward, backward and an AdamW step on the same batch and weights; their
losses must agree. speculators runs with its eager loss and with either attention that works
without a GPU, in fp32 and under bf16 autocast: its fastest counts. Runs are interleaved, medians
are compared, and the speed of plain matrix products is measured in the same run.
"""

import argparse
import datetime as dt
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tasks.eagle3.batches import PackedBatch, TrainingSample, pack  # noqa: E402
from tasks.eagle3.draft import (  # noqa: E402
    DraftSettings,
    Eagle3DraftModel,
    build_draft,
    draft_config,
    eager_loss,
    trainable_parameters,
)
from tasks.eagle3.training_step import Precision, plan_batch, training_forward  # noqa: E402

TTT_STEPS = 3
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
CHAT_TOKENS = 180
UNSUPERVISED_TOKENS = 36  # the prompt: 80 % of a chat's tokens are supervised

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "max_position_embeddings": 8192,
}


@dataclass
class Contender:
    """One way to take a training step."""

    name: str
    precision: Precision
    step: Callable[[], float]
    seconds: list[float]
    losses: list[float]

    def run(self) -> None:
        """Take a step and note what it took."""
        started = time.perf_counter()
        loss = self.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss)

    @property
    def median(self) -> float:
        """Seconds of the median step, the first one left out."""
        return statistics.median(self.seconds[1:])


def make_draft(draft_vocab_size: int) -> Eagle3DraftModel:
    """A draft with random verifier tensors; the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    vocab, hidden = SMOLLM2["vocab_size"], SMOLLM2["hidden_size"]
    config = draft_config(
        SMOLLM2,
        draft_vocab_size=draft_vocab_size,
        layer_ids=[2, 15, 27],
        settings=DraftSettings(),
        verifier_name_or_path="none",
        verifier_architectures=["LlamaForCausalLM"],
        draft_tokens=TTT_STEPS,
    )
    t2d = torch.arange(vocab) < draft_vocab_size
    return build_draft(
        config,
        embed=torch.randn(vocab, hidden, generator=generator),
        norm=torch.rand(hidden, generator=generator) + 0.5,
        head=torch.randn(vocab, hidden, generator=generator) * 0.1,
        t2d=t2d,
        d2t=torch.zeros(draft_vocab_size, dtype=torch.long),
        seed=0,
    )


def make_batch(tokens: int) -> PackedBatch:
    """Chats of 100 to 260 tokens, a prompt of a fifth of each, packed to `tokens` rows."""
    generator = torch.Generator().manual_seed(1)
    hidden, samples, rows = int(SMOLLM2["hidden_size"]), [], 0
    while rows < tokens:
        drawn = int(torch.randint(CHAT_TOKENS - 80, CHAT_TOKENS + 81, (1,), generator=generator))
        length = min(drawn, tokens - rows + 1)
        length += tokens - rows - length + 1 if tokens - rows - length < 100 else 0
        rows += length - 1
        samples.append(
            TrainingSample(
                input_ids=torch.randint(int(SMOLLM2["vocab_size"]), (length,), generator=generator),
                aux=torch.randn(length, 3 * hidden, generator=generator),
                last=torch.randn(length, hidden, generator=generator),
                loss_mask=torch.arange(length) >= length * UNSUPERVISED_TOKENS // CHAT_TOKENS,
            )
        )
    return pack(samples)


def our_step(batch: PackedBatch, precision: Precision, draft_vocab_size: int) -> Contender:
    """This project's step, with the planning of the batch counted in."""
    draft = make_draft(draft_vocab_size)
    optimizer = torch.optim.AdamW(trainable_parameters(draft).values(), lr=1e-5, fused=True)

    def step() -> float:
        plan = plan_batch(draft, batch, ttt_steps=TTT_STEPS)
        result = training_forward(draft, batch, ttt_steps=TTT_STEPS, precision=precision, plan=plan)
        return finish(result.loss, optimizer)

    return Contender(f"ours, {precision}", precision, step, [], [])


def peer_step(
    batch: PackedBatch, precision: Precision, attention: str, draft_vocab_size: int
) -> Contender:
    """speculators' forward on the same weights."""
    source = make_draft(draft_vocab_size)
    source.config.transformer_layer_config._attn_implementation = attention
    draft: Any = Eagle3DraftModel(source.config)
    draft.load_state_dict(source.state_dict())
    optimizer = torch.optim.AdamW(trainable_parameters(draft).values(), lr=1e-5, fused=True)
    loss_config = {"kl_div": (eager_loss("kl_div"), 1.0)}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")

    def step() -> float:
        with autocast:
            _, loss, _ = draft(
                batch.aux[None],
                batch.input_ids[None],
                batch.document_ids[None],
                loss_mask=batch.loss_mask[None],
                position_ids=batch.position_ids[None],
                verifier_last_hidden_states=batch.last[None],
                ttt_steps=TTT_STEPS,
                loss_config=loss_config,
            )
        return finish(loss, optimizer)

    return Contender(f"speculators, {precision}, {attention}", precision, step, [], [])


def finish(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Backward and update, alike for both sides."""
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def matmul_ceiling(dtype: torch.dtype) -> float:
    """GFLOP/s of the best of a few products of the head's shape."""
    states, head = torch.randn(2048, 576, dtype=dtype), torch.randn(8192, 576, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        states @ head.T
        best = min(best, time.perf_counter() - started)
    return 2 * 2048 * 576 * 8192 / best / 1e9


def check_losses(contenders: list[Contender]) -> None:
    """The first step's losses come from equal weights: they must agree."""
    reference = next(c for c in contenders if c.name == "speculators, fp32, eager").losses[0]
    for contender in contenders:
        off = abs(contender.losses[0] / reference - 1)
        if off > LOSS_TOLERANCE[contender.precision]:
            raise SystemExit(
                f"{contender.name} has loss {contender.losses[0]}, speculators {reference}: "
                f"{off:.1e} apart, more than {LOSS_TOLERANCE[contender.precision]}"
            )


def report(
    contenders: list[Contender], batch: PackedBatch, ceilings: dict[str, float]
) -> dict[str, Any]:
    """Print the table and return the record."""
    ours = [c for c in contenders if c.name.startswith("ours")]
    peers = [c for c in contenders if not c.name.startswith("ours")]
    for contender in sorted(contenders, key=lambda c: c.median):
        print(
            f"{contender.name:32s} {contender.median * 1e3:8.0f} ms"
            f" {len(batch) / contender.median:8.0f} tokens/s   loss {contender.losses[0]:.6f}"
        )
    for precision, ceiling in ceilings.items():
        print(f"matmul ceiling {precision}: {ceiling:.0f} GFLOP/s")
    same: dict[str, float] = {}
    for contender in ours:
        fastest = min(
            (c for c in peers if c.precision == contender.precision), key=lambda c: c.median
        )
        same[contender.precision] = round(fastest.median / contender.median, 2)
        print(f"{contender.precision}: {same[contender.precision]}x {fastest.name}")
    best, fastest = (min(group, key=lambda c: c.median) for group in (ours, peers))
    ratio = fastest.median / best.median
    print(f"{best.name} is {ratio:.2f}x as fast as {fastest.name}")
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers", "speculators")},
        "command": "python tests/benchmarks/bench_train.py",
        "benchmark": "train step, SmolLM2-135M draft, 2048 packed tokens, TTT 3",
        "ours": round(len(batch) / best.median, 1),
        "peer": round(len(batch) / fastest.median, 1),
        "ratio": round(ratio, 2),
        "unit": "tokens/s",
        "ceiling": {name: round(value, 1) for name, value in ceilings.items()},
        "peer_name": fastest.name,
        "ratio_same_precision": same,
        "milliseconds": {c.name: round(c.median * 1e3, 1) for c in contenders},
        "supervised": round(float(batch.loss_mask.float().mean()), 3),
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a quarter of the batch")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    draft_vocab_size = 8192
    batch = make_batch(512 if arguments.quick else 2048)
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    contenders = [our_step(batch, precision, draft_vocab_size) for precision in precisions]
    contenders += [
        peer_step(batch, precision, attention, draft_vocab_size)
        for precision in precisions
        for attention in ("eager", "sdpa")
    ]
    for _ in range(3 if arguments.quick else 6):
        for contender in contenders:
            contender.run()
    check_losses(contenders)
    ceilings = {"fp32": matmul_ceiling(torch.float32), "bf16": matmul_ceiling(torch.bfloat16)}
    record = report(contenders, batch, ceilings)
    if arguments.record:
        if arguments.quick:
            raise SystemExit("a quick run is not recorded; leave --quick out")
        with (REPOSITORY / "tests/benchmarks/results.jsonl").open("a") as results:
            results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
