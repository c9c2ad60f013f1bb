"""Whether a store has room for what a stage is going to write: asked before the work, where a store can tell."""

from storage.store import Store
from tasks.byte_sizes import show_bytes

CHECKPOINT_VALUE_BYTES = 12
"""A trainable parameter in a checkpoint: its weight and two moments in fp32."""
WEIGHT_BYTES = 4
"""A trainable parameter in the best weights and in the trained draft: fp32."""


class DiskSpaceError(ValueError):
    """The store has less room than a stage needs; the message has the numbers and the ways out."""


def check_states_space(
    store: Store, *, samples: int, tokens: int, bytes_per_token: int, codec: str
) -> None:
    """Raise DiskSpaceError when the store has no room for the states of so many samples."""
    halve = "set capture.codec to fp8 (half of it), " if codec == "bf16" else ""
    _check(
        store,
        tokens * bytes_per_token,
        what=f"capture: the states of {samples:,} samples take",
        because=f"{tokens:,} tokens x {bytes_per_token:,} bytes",
        way_out=f"free some space (outrider prune), {halve}capture fewer samples or name another store",
    )


def check_training_space(store: Store, path: str, *, trainable: int, kept_checkpoints: int) -> None:
    """Raise DiskSpaceError when a training of `trainable` parameters has no room for its checkpoints.

    While one is written all that are kept are there, and so are the best weights while better ones replace them.
    What the training at `path` has stored already is part of that.
    """
    checkpoints = kept_checkpoints + 1
    there = sum(store.sizes(path).values())
    _check(
        store,
        trainable * (CHECKPOINT_VALUE_BYTES * checkpoints + WEIGHT_BYTES * 2) - there,
        what="train: the checkpoints take",
        because=f"{trainable:,} trainable parameters x ({checkpoints} checkpoints x {CHECKPOINT_VALUE_BYTES} bytes "
        f"+ 2 best weights x {WEIGHT_BYTES}) - {show_bytes(there)} that are there",
        way_out="free some space (outrider prune), lower train.keep_checkpoints or name another store",
    )


def _check(store: Store, needed_bytes: int, *, what: str, because: str, way_out: str) -> None:
    free = store.free_bytes()
    if free is not None and needed_bytes > free:
        raise DiskSpaceError(
            f"{what} {show_bytes(needed_bytes)} ({because}), but {store.url} has {show_bytes(free)} free; {way_out}"
        )
