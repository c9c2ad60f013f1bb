"""Which tokens the draft can propose.

V = verifier vocabulary, D = draft vocabulary

The draft's head has D rows, one for each chosen token in ascending order of its id. `d2t` holds
offsets, as speculators and vLLM read it: target_id = draft_id + d2t[draft_id].
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """The chosen tokens and the counts they were chosen by.

    Attributes:
        d2t: [D] int64 offsets from draft id to target id.
        t2d: [V] bool, true for the chosen tokens.
        counts: [V] int64, how often each token was supervised on the train side.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int64]

    @property
    def draft_size(self) -> int:
        """Tokens D the draft can propose."""
        return len(self.d2t)

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """[D] verifier's id of each draft id."""
        return np.arange(self.draft_size, dtype=np.int64) + self.d2t

    def validate(self) -> None:
        """Check that both directions name the same tokens.

        Raises:
            ValueError: shapes or types are off, or the two arrays contradict each other.
        """
        if self.t2d.dtype != np.bool_ or self.d2t.dtype != np.int64:
            raise ValueError(
                f"t2d is {self.t2d.dtype} and d2t {self.d2t.dtype}; bool and int64 are read"
            )
        if self.t2d.ndim != 1 or self.d2t.ndim != 1 or self.t2d.shape != self.counts.shape:
            raise ValueError(
                f"shapes t2d {self.t2d.shape}, d2t {self.d2t.shape} and counts {self.counts.shape} "
                "do not belong together; t2d and counts have the length of the vocabulary"
            )
        ids = self.target_ids
        if int(self.t2d.sum()) != self.draft_size:
            raise ValueError(
                f"t2d marks {int(self.t2d.sum())} tokens and d2t has {self.draft_size}"
            )
        if self.draft_size and (
            ids[0] < 0 or ids[-1] >= len(self.t2d) or (np.diff(ids) <= 0).any()
        ):
            raise ValueError(f"target ids i + d2t[i] do not ascend within 0 to {len(self.t2d) - 1}")
        if not self.t2d[ids].all():
            stray = ids[~self.t2d[ids]]
            raise ValueError(
                f"{len(stray)} target ids, the first {stray[0]}, are not marked in t2d; "
                "d2t holds offsets, not ids"
            )

    def coverage(self, counts: npt.ArrayLike) -> float:
        """Share of the counted tokens [V] that the draft can propose: a bound on its acceptance.

        Of no tokens at all none is missed: 1.

        Raises:
            ValueError: counts of another vocabulary.
        """
        counted = np.asarray(counts)
        if counted.shape != self.t2d.shape:
            raise ValueError(
                f"counts of shape {counted.shape} against a vocabulary of {len(self.t2d)} tokens"
            )
        total = int(counted.sum())
        return int(counted[self.t2d].sum()) / total if total else 1.0

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The three arrays by name."""
        return {"d2t": self.d2t, "t2d": self.t2d, "counts": self.counts}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.ArrayLike]) -> "VocabMap":
        """The map of `to_arrays`, validated.

        Raises:
            ValueError: an array is missing or contradicts the others.
        """
        missing = sorted({"d2t", "t2d", "counts"} - set(arrays))
        if missing:
            raise ValueError(f"a vocabulary map needs d2t, t2d and counts; missing: {missing}")
        made = cls(**{name: np.asarray(arrays[name]) for name in ("d2t", "t2d", "counts")})
        made.validate()
        return made


def build_vocab_map(
    counts: npt.ArrayLike, *, draft_size: int, forced: Iterable[int] = ()
) -> VocabMap:
    """Choose the D most frequent tokens, the forced ones among them.

    Ties go to the lower id. Tokens never seen fill what is left in the same way: in a BPE
    vocabulary ids follow the order of merges, so a low id is a frequent token elsewhere.

    Args:
        counts: [V] how often each token is supervised on the train side.
        draft_size: Tokens D to choose; V keeps the full vocabulary.
        forced: Tokens that must be in it however rare: without its end-of-turn token a draft
            cannot propose to stop.

    Raises:
        ValueError: sizes or ids that contradict the vocabulary, or nothing was counted.
    """
    counted = np.asarray(counts, dtype=np.int64)
    special = np.unique(np.fromiter(forced, dtype=np.int64))
    _check(counted, special, draft_size=draft_size)
    by_rank = np.argsort(-counted, kind="stable")
    free = by_rank[~np.isin(by_rank, special)]
    chosen = np.sort(np.concatenate([special, free[: draft_size - len(special)]]))
    t2d = np.zeros(len(counted), dtype=np.bool_)
    t2d[chosen] = True
    made = VocabMap(chosen - np.arange(draft_size, dtype=np.int64), t2d, counted)
    made.validate()
    return made


def _check(
    counts: npt.NDArray[np.int64], forced: npt.NDArray[np.int64], *, draft_size: int
) -> None:
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError(f"counts of shape {counts.shape} must be one non-negative row per token")
    if draft_size > len(counts):
        raise ValueError(
            f"draft_size {draft_size} exceeds the verifier's vocabulary {len(counts)}; "
            f"lower it, or set it to {len(counts)} to keep the full vocabulary"
        )
    if draft_size < max(1, len(forced)):
        raise ValueError(
            f"draft_size {draft_size} holds fewer tokens than the {len(forced)} forced ones and is "
            "at least 1; raise it"
        )
    if len(forced) and not (forced[0] >= 0 and forced[-1] < len(counts)):
        raise ValueError(
            f"forced ids {forced[0]} to {forced[-1]} are not within the vocabulary of {len(counts)}"
        )
    if not counts.any():
        raise ValueError("no supervised token was counted; there is nothing to choose tokens by")
