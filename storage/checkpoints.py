"""Training checkpoints: all that a training needs to go on as if it had never stopped.

A checkpoint is complete or is none. Its tensors keep their dtype (weights, optimizer moments,
random states as bytes), its state is JSON, and both are digested again when they are read.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from storage.artifacts import (
    Identity,
    open_file,
    read_manifest,
    remove,
    remove_garbage,
    verify,
    write,
)
from storage.layout import (
    MANIFEST_NAME,
    STATE_FILE,
    TENSORS_FILE,
    checkpoint_directory,
    parse_step,
    steps_directory,
)
from storage.manifest import Manifest, canonical_json
from storage.store import Store, StoreError

if TYPE_CHECKING:  # torch takes seconds to import and most readers of a store need none
    import torch

logger = logging.getLogger(__name__)

STAGE = "checkpoint"
VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read; the message names it and the one to go on from instead."""


def save_checkpoint(
    store: Store,
    train_key: str,
    *,
    step: int,
    tensors: Mapping[str, "torch.Tensor"],
    state: Mapping[str, Any],
) -> Manifest:
    """Store the checkpoint after optimizer step `step`; a process killed on the way leaves none.

    Args:
        store: where.
        train_key: key of the training it belongs to.
        step: optimizer steps done.
        tensors: any dtypes and devices; they must not change until this returns.
        state: the rest, as plain JSON types.

    Raises:
        ValueError: `state` is no JSON.
        StoreError: it could not be written.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - it imports torch

    state_json = canonical_json(dict(state), name="state")
    with write(store, _identity(train_key, step)) as writer:
        with writer.file(TENSORS_FILE) as path:
            save_file(_separate(tensors), path)
        writer.add_bytes(STATE_FILE, state_json.encode())
        return writer.publish(rows=len(tensors), facts={"step": step})


def list_checkpoints(store: Store, train_key: str) -> list[int]:
    """Steps that have a manifest, ascending; whether their files are whole is not looked at."""
    directory = steps_directory(train_key)
    return sorted(
        parse_step(name)
        for name in store.directories(directory)
        if store.size(f"{directory}/{name}/{MANIFEST_NAME}") is not None
    )


def latest_checkpoint(store: Store, train_key: str) -> tuple[int, Manifest] | None:
    """The complete checkpoint of the highest step, or None.

    One that is short is set aside and passed over.
    """
    for step in reversed(list_checkpoints(store, train_key)):
        manifest = read_manifest(store, checkpoint_directory(train_key, step))
        if manifest is not None and manifest.key == _identity(train_key, step).key:
            return step, manifest
    return None


def load_checkpoint(
    store: Store, manifest: Manifest
) -> tuple[dict[str, "torch.Tensor"], dict[str, Any]]:
    """The tensors (on the CPU) and the state of a checkpoint, digests checked.

    Raises:
        CheckpointError: it is short or corrupt; training from anything else would be another run.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - see above
    from safetensors.torch import load_file  # noqa: PLC0415

    problems = verify(store, manifest, deep=True)
    if problems:
        raise CheckpointError(_unreadable(store, manifest, "; ".join(problems)))
    try:
        with open_file(store, manifest, STATE_FILE) as path:
            state: dict[str, Any] = json.loads(path.read_bytes())
        with open_file(store, manifest, TENSORS_FILE) as path:
            tensors: dict[str, torch.Tensor] = load_file(path)  # mapped privately: writing is safe
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(_unreadable(store, manifest, str(error))) from error
    return tensors, state


def prune_checkpoints(
    store: Store, train_key: str, *, keep: int = 2, protect: Iterable[int] = ()
) -> list[int]:
    """Delete all but the `keep` highest steps and those in `protect`; returns the deleted steps.

    What killed saves left behind goes too, once it is old. A failure to delete is logged: space is
    not worth a run.

    Raises:
        ValueError: `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(
            f"keep must be 1 or more, not {keep}: a training needs a checkpoint to go on"
        )
    protected = set(protect)
    surplus = [s for s in list_checkpoints(store, train_key)[:-keep] if s not in protected]
    try:
        for step in surplus:
            remove(store, checkpoint_directory(train_key, step))
        for name in store.directories(steps_directory(train_key)):
            remove_garbage(store, f"{steps_directory(train_key)}/{name}")
    except StoreError as error:
        logger.warning("old checkpoints of %s stay for now: %s", train_key, error)
    return surplus


def _identity(train_key: str, step: int) -> Identity:
    return Identity(
        stage=STAGE,
        version=VERSION,
        settings={"train_key": train_key, "step": step},
        inputs={},
        directory=checkpoint_directory(train_key, step),
    )


def _separate(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Contiguous CPU tensors that share no memory: safetensors refuses tied weights."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        separate[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return separate


def _unreadable(store: Store, manifest: Manifest, reason: str) -> str:
    train_key, step = str(manifest.settings["train_key"]), int(manifest.settings["step"])
    older = [found for found in list_checkpoints(store, train_key) if found < step]
    if older:
        instead = f"delete it to go on from {checkpoint_directory(train_key, older[-1])}"
    else:
        instead = "there is no older one: delete it to train from the start"
    return f"the checkpoint {store.url}/{manifest.path} cannot be read ({reason}); {instead}"
