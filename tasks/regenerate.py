"""Stage regenerate (optional): the verifier writes the last answer of every conversation anew.

A draft learns to say what its verifier says, so answers by anyone else are a worse teacher. The stage works in
chunks of conversations, each an artifact: a killed run goes on at the next chunk.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import REGENERATED
from storage.manifest import Manifest
from storage.row_ranges import RowRange, split
from storage.store import Store
from tasks.gpus import REFUSE, GpuNeed, GpuPolicy
from tasks.hardware import decoding_dtype
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.stage_settings import StageSettings

VERSION = 1
MODULE = "tasks.jobs.regenerate"


class RegenerateSettings(StageSettings):
    """How the verifier writes answers; takes effect with data.regenerate."""

    resources: ClassVar[frozenset[str]] = frozenset({"batch_size", "device"})

    max_new_tokens: PositiveInt = 512
    """Longest answer, in tokens; a conversation that leaves less room within the verifier's positions gets that."""
    conversations_per_chunk: PositiveInt = 64
    """Conversations that are written and saved together."""
    batch_size: PositiveInt = 32
    """Conversations that are decoded at once."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the verifier computes in; auto: float32 on a CPU, else as its weights are stored."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda, or one of several GPUs, such as cuda:1."""


@stage_task
def regenerate(
    store: Store,
    conversations: StageResult,
    verifier: Verifier,
    settings: RegenerateSettings,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Write the last answers of all conversations with the verifier, greedily, chunk by chunk."""
    settings = _settled(settings)
    requests: list[dict[str, Any]] = [
        {
            "conversations": part.path,
            "rows": [rows.start, rows.stop],
            **verifier.place,
            "eos_token_ids": list(verifier.facts.eos_token_ids),
            "max_positions": verifier.facts.max_position_embeddings,
            "settings": settings.model_dump(mode="json"),
        }
        for part, rows in _chunks(conversations, settings)
    ]
    wanted = _identities(conversations, verifier, settings)
    return build_parts(
        store, wanted, MODULE, requests=requests, gpus=GpuNeed(settings.device, policy=gpu_policy)
    )


def find_regenerated(
    store: Store, conversations: StageResult, verifier: Verifier, settings: RegenerateSettings
) -> StageResult | None:
    """Return the regenerated conversations when all of them are written already."""
    found = artifacts.find_all(store, _identities(conversations, verifier, _settled(settings)))
    there = tuple(part for part in found if part is not None)
    return StageResult(there, reused=True) if len(there) == len(found) else None


def _settled(settings: RegenerateSettings) -> RegenerateSettings:
    dtype = decoding_dtype(settings.dtype, settings.device)
    return settings.model_copy(update={"dtype": dtype})


def _chunks(
    conversations: StageResult, settings: RegenerateSettings
) -> list[tuple[Manifest, RowRange]]:
    return [
        (part, rows)
        for part in conversations.parts
        for rows in split(part.rows, settings.conversations_per_chunk)
    ]


def _identities(
    conversations: StageResult, verifier: Verifier, settings: RegenerateSettings
) -> list[Identity]:
    return [
        Identity(
            stage=REGENERATED,
            version=VERSION,
            settings={**settings.identity(), "rows": [rows.start, rows.stop]},
            inputs={"conversations": part.content, "verifier": verifier.identity},
        )
        for part, rows in _chunks(conversations, settings)
    ]
