"""Stage map_vocab: supervised tokens of the train side -> the draft's vocabulary (d2t, t2d)."""

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt

from storage import artifacts
from storage.arrays import write_arrays
from storage.artifacts import Identity
from storage.layout import SAMPLES_TABLE, SPLIT_TABLE, VOCAB_FILE, VOCAB_MAP
from storage.store import Store
from storage.tables import ragged, read_table
from tasks.eagle3.vocab_map import build_vocab_map
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, stage_task
from tasks.stage_settings import StageSettings

VERSION = 1


class VocabSettings(StageSettings):
    """The draft's vocabulary."""

    draft_size: PositiveInt | None = 32_000
    """Tokens the draft can propose, at most the verifier's vocabulary; null for all of them."""


def check_draft_size(settings: VocabSettings, vocab_size: int) -> int:
    """Return the draft's vocabulary size; ValueError when it exceeds the verifier's."""
    if settings.draft_size is None:
        return vocab_size
    if settings.draft_size > vocab_size:
        raise ValueError(
            f"vocab.draft_size {settings.draft_size} exceeds the verifier's vocabulary {vocab_size}; "
            "lower it or set it to null to keep the full vocabulary"
        )
    return settings.draft_size


@stage_task
def map_vocab(
    store: Store,
    samples: StageResult,
    split: StageResult,
    verifier: Verifier,
    settings: VocabSettings,
) -> StageResult:
    """Count the supervised tokens of the train side and keep the most frequent."""
    vocab_size = verifier.facts.vocab_size
    draft_size = check_draft_size(settings, vocab_size)
    wanted = Identity(
        stage=VOCAB_MAP,
        version=VERSION,
        settings={"draft_size": draft_size, "vocab_size": vocab_size},
        inputs={"samples": samples.content, "split": split.content},
    )
    found = artifacts.find(store, wanted)
    if found is not None:
        return StageResult((found,), reused=True)
    counts = _count_by_side(store, samples, split, vocab_size=vocab_size)
    vocab = build_vocab_map(
        counts["train"], draft_size=draft_size, forced=verifier.facts.eos_token_ids
    )
    facts = {
        "draft size": draft_size,
        "distinct train tokens": int((counts["train"] > 0).sum()),
        **{f"coverage {side}": round(vocab.coverage(c), 4) for side, c in counts.items()},
    }
    with artifacts.write(store, wanted) as writer:
        with writer.file(VOCAB_FILE) as path:
            write_arrays(path, vocab.to_arrays())
        manifest = writer.publish(rows=draft_size, facts=facts)
    return StageResult((manifest,), reused=False)


def _count_by_side(
    store: Store, samples: StageResult, split: StageResult, *, vocab_size: int
) -> dict[str, npt.NDArray[np.int64]]:
    """Count for each side how often each token id is supervised: side -> counts [V]."""
    with artifacts.open_file(store, split.parts[0], SPLIT_TABLE) as path:
        rows = read_table(path).to_pylist()
    side_of = {row["conversation_id"]: row["side"] for row in rows}
    counts = {side: np.zeros(vocab_size, np.int64) for side in ("train", *side_of.values())}
    seen: set[str] = set()
    for part in samples.parts:
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            table = read_table(path)
        ids, masks = ragged(table.column("input_ids")), ragged(table.column("loss_mask"))
        conversations = table.column("conversation_id").to_pylist()
        for row, sample in enumerate(table.column("sample_id").to_pylist()):
            if sample in seen:
                continue
            seen.add(sample)
            supervised = ids.row(row)[masks.row(row)]
            if supervised.max(initial=0) >= vocab_size:
                raise ValueError(
                    f"token id {supervised.max()} lies beyond the verifier's vocabulary of "
                    f"{vocab_size}; its tokenizer and its config do not belong together"
                )
            counts[side_of[conversations[row]]] += np.bincount(supervised, minlength=vocab_size)
    return counts
