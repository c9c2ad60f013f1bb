"""What bench_capture compares with: a plain transformers loop, a random verifier, random texts, a matmul ceiling."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tasks.capture_settings import CaptureSettings

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip


KEPT_EVERY = 8


def make_verifier(directory: Path, device: str) -> Path:
    """A random bf16 model of Qwen3-8B's shape, without a tokenizer: nothing here reads text.

    Its layers add little to the embedding: what they round stays small, as in a trained model, and the canary holds.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_config: Any = Qwen3Config
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(make_config(**QWEN3_8B))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
        for layer in model.model.layers:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight.div_(math.sqrt(2 * len(model.model.layers)))
    model.save_pretrained(directory)
    return directory


def random_samples(count: int, shortest: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Random tokens, lengths log-uniform in [shortest, longest]; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(count, generator=generator).tolist()
    lengths = [round(shortest * math.exp(u * math.log(longest / shortest))) for u in shares]
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def plain_batches(
    samples: Sequence[Sequence[int]], tokens_per_batch: int
) -> Iterator[list[Sequence[int]]]:
    """The samples in their order, as many as fit when padded to the longest."""
    batch: list[Sequence[int]] = []
    for sample in samples:
        longest = max(len(one) for one in [*batch, sample])
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


@torch.inference_mode()
def plain_loop(  # noqa: PLR0917 - as plain as the loop itself
    model: Any,
    samples: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    settings: CaptureSettings,
    directory: Path,
    logits: bool,
) -> dict[int, Tensor]:
    """What a script of a page does; returns the aux of one in KEPT_EVERY samples."""
    device = next(model.parameters()).device
    forward = model if logits else model.base_model
    found: dict[int, Tensor] = {}
    waiting: dict[str, Tensor] = {}
    done = 0
    for batch in plain_batches(samples, settings.tokens_per_batch):
        longest = max(map(len, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(batch):
            ids[row, : len(sample)] = torch.as_tensor(sample)
            mask[row, : len(sample)] = 1
        own = forward(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        for row, sample in enumerate(batch):
            aux = torch.cat([own[i][row, : len(sample)] for i in layer_ids], dim=-1)
            waiting[f"{done}.aux"] = aux.to("cpu", torch.bfloat16)
            if done % KEPT_EVERY == 0:
                found[done] = waiting[f"{done}.aux"]
            last = own[-1][row, : len(sample)]
            waiting[f"{done}.last"] = last.to("cpu", torch.bfloat16).contiguous()
            done += 1
            if len(waiting) == 2 * settings.rows_per_shard or done == len(samples):
                save_file(waiting, directory / f"{done}.safetensors")
                waiting = {}
    return found


def sustained_ceiling(dtype: torch.dtype, device: str, seconds: float = 4.0) -> float:
    """GFLOP/s of a large product that goes on for seconds: a GPU at its power limit lowers its clock."""
    left, right = (torch.randn(8192, 8192, dtype=dtype, device=device) for _ in range(2))
    times: list[float] = []
    while sum(times) < seconds:
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 10 * 2 * 8192**3 / statistics.median(times[len(times) // 2 :]) / 1e9


def matmul_ceiling(dtype: torch.dtype, device: str) -> float:
    """GFLOP/s of the best of a few products: the MLP's own shape on a CPU, a large square on a GPU."""
    if device == "cuda":
        left, right = (torch.randn(8192, 8192, dtype=dtype, device=device) for _ in range(2))
    else:
        left, right = torch.randn(1024, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    best, repeats = float("inf"), 10
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(repeats):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * left.shape[0] * left.shape[1] * right.shape[1] * repeats / best / 1e9
