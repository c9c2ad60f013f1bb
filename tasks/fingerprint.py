"""What a draft is trained on, told apart without reading it: the state of the source files, and the verifier's.

A run that went through leaves it in the store; whoever compares with that knows whether there is anything new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.layout import trained_file
from storage.manifest import canonical_digest, digest_file
from storage.sources import expand_sources, stamp_source
from storage.store import Store
from tasks.collect import DataSettings
from tasks.eagle3.model_files import LocalFiles
from tasks.eagle3.verifier import digest_model
from tasks.verifier_sources import VerifierSettings, local_path, needed_files, open_model

MANY = 3
"""Changed files that are named; of more, only how many."""


@dataclass(frozen=True)
class Fingerprint:
    """The state of all that a training takes in; equal ones have nothing new between them."""

    sources: Mapping[str, str]
    """File -> its bytes and version."""
    verifier: str

    @property
    def digest(self) -> str:
        """All of it in one word."""
        return canonical_digest({"sources": dict(self.sources), "verifier": self.verifier})

    def changes_since(self, before: "Fingerprint | None") -> list[str]:
        """What is new or different, one phrase each; empty when nothing is."""
        if before is None:
            return [f"{len(self.sources)} source files, and nothing was trained on them yet"]
        old, new = before.sources, self.sources
        changes = [
            _phrase(f"{kind} source file", files)
            for kind, files in (
                ("new", sorted(new.keys() - old.keys())),
                ("changed", sorted(url for url in new.keys() & old.keys() if new[url] != old[url])),
                ("removed", sorted(old.keys() - new.keys())),
            )
            if files
        ]
        return changes + (["another verifier"] if self.verifier != before.verifier else [])


def take_fingerprint(data: DataSettings, verifier: VerifierSettings) -> Fingerprint:
    """Return the state of the sources and of the verifier as they are now: no source is read, nothing is fetched.

    Raises ValueError when a source or the verifier does not exist.
    """
    sources = {url: stamp_source(url) for url in expand_sources(list(data.sources))}
    return Fingerprint(sources, _verifier_version(verifier))


def last_trained(store: Store, name: str, draft: str) -> Fingerprint | None:
    """What the last completed run of the settings `name` for this draft was trained on; None when there was none.

    Two verifiers may be trained for under one name: each has a draft of its own.
    """
    file = trained_file(name, draft)
    try:
        values = store.read_json(file)
        return Fingerprint(dict(values["sources"]), str(values["verifier"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{store.url}/{file} cannot be read ({error}); delete it to have everything count as new"
        ) from error


def record_trained(
    store: Store, name: str, draft: str, fingerprint: Fingerprint, *, run: str
) -> None:
    """Note, in one step, what the run `run` of the settings `name` for this draft was trained on."""
    values: dict[str, Any] = {
        "run": run,
        "fingerprint": fingerprint.digest,
        "sources": dict(fingerprint.sources),
        "verifier": fingerprint.verifier,
    }
    store.write_json(trained_file(name, draft), values)


def _verifier_version(settings: VerifierSettings) -> str:
    """A text that changes when the model does: of files here their digest, of remote ones what the listing says."""
    path = local_path(settings)
    if path is not None and path.suffix == ".gguf" and path.is_file():
        return digest_file(path)
    files = open_model(settings)
    if isinstance(files, LocalFiles):
        return digest_model(files.path).whole
    names = needed_files(files, code=settings.trust_remote_code)
    return canonical_digest(
        {name: [files.listing[name].bytes, files.listing[name].version] for name in names}
    )


def _phrase(what: str, files: list[str]) -> str:
    counted = f"{len(files)} {what}{'s' if len(files) != 1 else ''}"
    return f"{counted}: {', '.join(files)}" if len(files) <= MANY else counted
