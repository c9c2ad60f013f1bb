"""Stage load_verifier: a model's directory -> its facts and the three tensors a draft needs."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import FACTS_FILE, VERIFIER
from storage.manifest import Manifest
from storage.store import Store
from tasks.eagle3.model_files import LocalFiles, Stamp, VerifierError, file_stamps
from tasks.eagle3.verifier import ModelDigests, VerifierFacts, digest_model
from tasks.eagle3.weight_files import weight_file_names
from tasks.progress import count_bytes
from tasks.stage import StageResult, build_parts, stage_task

VERSION = 3


@dataclass(frozen=True)
class Verifier:
    """A verifier ready for the other stages: where its files are, what it is, and its stored tensors."""

    directory: str
    facts: VerifierFacts
    manifest: Manifest
    trust_remote_code: bool
    files: Mapping[str, Stamp]
    """The model's files as they were when it was opened: what is made of other ones later is not published."""

    @property
    def place(self) -> dict[str, Any]:
        """What a child process needs to load model and tokenizer, as a request's part."""
        return {
            "directory": self.directory,
            "trust_remote_code": self.trust_remote_code,
            "files": {name: list(stamp) for name, stamp in self.files.items()},
        }

    @property
    def identity(self) -> str:
        """Digest of config, weights, tokenizer and template: the same wherever the files lie."""
        return self.manifest.inputs["model"]

    @property
    def states_identity(self) -> str:
        """Identity by which its hidden states are known: with another tokenizer or template it makes the same."""
        return str(self.manifest.facts.get("states of", self.identity))


@stage_task
def load_verifier(
    store: Store, directory: str, *, trust_remote_code: bool = False, full_digests: bool = False
) -> StageResult:
    """Read a verifier's facts and its embedding, final norm and head: never more of it.

    What was read while code was trusted is read anew once it is not: then it may be refused. Weight files
    over 1 GiB are told apart by a sample of their bytes, with `full_digests` by all.
    """
    digests = _digests(Path(directory), full_digests=full_digests)
    request = {
        "directory": directory,
        "trust_remote_code": trust_remote_code,
        "digests": {
            "computation": digests.computation,
            "states of": _states_of(store, digests),
        },
    }
    wanted = Identity(
        stage=VERIFIER,
        version=VERSION,
        settings={"trust_remote_code": True} if trust_remote_code else {},
        inputs={"model": digests.whole},
    )
    return build_parts(store, [wanted], "tasks.jobs.load_verifier", requests=[request])


def open_verifier(
    store: Store,
    directory: str,
    manifest: Manifest,
    *,
    trust_remote_code: bool = False,
    files: Mapping[str, Stamp] | None = None,
) -> Verifier:
    """Return the verifier that load_verifier published; `files` are its files' stamps, by default as they are now."""
    with artifacts.open_file(store, manifest, FACTS_FILE) as path:
        facts = VerifierFacts.model_validate(json.loads(path.read_text())["facts"])
    stamps = file_stamps(Path(directory)) if files is None else files
    return Verifier(directory, facts, manifest, trust_remote_code, stamps)


def check_same_model(verifier: Manifest, directory: str, *, full_digests: bool) -> None:
    """Raise VerifierError unless the model in `directory` is the one that load_verifier has published as `verifier`."""
    found = _digests(Path(directory), full_digests=full_digests).whole
    wanted = verifier.inputs["model"]
    if found != wanted:
        raise VerifierError(
            f"the model in {directory} on {socket.gethostname()} is not the one that this run began with (its digest "
            f"is {found[:12]}, not {wanted[:12]}): put the same files there, or name a URL that all machines read in "
            "verifier.model"
        )


def _states_of(store: Store, digests: ModelDigests) -> str:
    """Return the identity of the first verifier of this store that computes the same; of a new one its own."""
    for known in artifacts.list_manifests(store, VERIFIER):
        if known.facts.get("computation") == digests.computation:
            return str(known.facts["states of"])
    return digests.whole


def _digests(directory: Path, *, full_digests: bool) -> ModelDigests:
    if not full_digests:
        return digest_model(directory)
    files = LocalFiles(directory)
    total_bytes = sum(files.sizes[name] for name in weight_file_names(files))
    progress = count_bytes("digest weights", total_bytes)
    return digest_model(directory, full_digests=True, progress=progress)
