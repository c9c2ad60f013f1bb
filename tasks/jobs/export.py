"""Job of export: write the speculator, load it by speculators itself, compare, then publish."""

from pathlib import Path
from typing import Any

import torch

from storage import artifacts
from storage.artifacts import Identity
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.eagle3.draft import Eagle3DraftModel, load_speculator, save_speculator
from tasks.engines.remote_code import admit
from tasks.jobs.drafts import make_draft, trained_weights
from tasks.jobs.verifiers import open_facts

FROM_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")


class ExportMismatchError(RuntimeError):
    """The checkpoint that speculators loads is not the draft that was trained."""


def run(request: dict[str, Any], _progress: ProgressCallback) -> dict[str, Any]:
    """Publish the speculators checkpoint of one trained draft."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    parts = request["draft"]
    # speculators asks for the verifier's config without trusting its code.
    admit(Path(parts["directory"]), trusted=request["trust_remote_code"])
    draft = make_draft(
        store,
        parts,
        seed=parts["seed"],
        draft_tokens=request["draft_tokens"],
        verifier_path=parts["directory"],
        weights=trained_weights(store, parts["weights"]),
    )
    plain = open_facts(store, artifacts.require(store, parts["verifier"])).transform.plain
    dtype = getattr(torch, request["dtype"])
    with artifacts.write(store, wanted) as writer:
        with writer.directory() as directory:
            save_speculator(draft, directory, dtype=dtype)
            compared = compare(draft, load_speculator(directory), dtype=dtype, plain_head=plain)
            if request["verifier_path"] != parts["directory"]:
                draft.config.speculators_config.verifier.name_or_path = request["verifier_path"]
                draft.config.save_pretrained(directory)
            size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
        writer.publish(
            rows=compared,
            facts={
                "tensors": compared,
                "dtype": request["dtype"],
                "bytes": size,
                "verifier": request["verifier_path"],
            },
        )
    return {}


def compare(
    trained: Eagle3DraftModel,
    loaded: Eagle3DraftModel,
    *,
    dtype: torch.dtype,
    plain_head: bool = True,
) -> int:
    """Compare every tensor of the loaded draft with the trained one's, rounded to `dtype`; returns their number.

    Two tensors serve training only and are read by speculators from the verifier itself. It knows no head transform:
    where the verifier has one (`plain_head` false) they are left out.
    """
    expected, actual = trained.state_dict(), loaded.state_dict()
    if expected.keys() != actual.keys():
        raise ExportMismatchError(
            f"export: tensors differ by name: {sorted(expected.keys() ^ actual.keys())}"
        )
    for name in () if plain_head else FROM_VERIFIER:
        del expected[name]
    for name, value in expected.items():
        rounded = value.to(dtype) if value.is_floating_point() else value
        if not torch.equal(rounded, actual[name].to(rounded.dtype)):
            raise ExportMismatchError(
                f"export: {name} came back from speculators with other values"
            )
    return len(expected)
