"""Stage load_verifier: a model on disk, in a package or on the hub -> its facts and the three tensors a draft needs."""

import importlib.util
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERTED, FACTS_FILE, VERIFIER
from storage.manifest import Manifest, digest_file
from storage.store import Store
from tasks.eagle3.verifier import VerifierError, VerifierFacts, identity
from tasks.stage import StageResult, build_parts, stage_task
from tasks.stage_settings import StageSettings

logger = logging.getLogger(__name__)

VERSION = 2
CONVERT_VERSION = 1
PACKAGE_PREFIX = "package://"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


class VerifierSettings(StageSettings):
    """The model whose drafts are trained."""

    resources: ClassVar[frozenset[str]] = frozenset({"model", "revision"})

    model: str = Field(min_length=1)
    """A directory, a .gguf file, `package://module/file` (a file inside an installed package) or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Whether code that the model's files bring along may run."""


@dataclass(frozen=True)
class Verifier:
    """A verifier ready for the other stages: where its files are, what it is, and its stored tensors."""

    directory: str
    facts: VerifierFacts
    manifest: Manifest

    @property
    def identity(self) -> str:
        """Digest of config, weights, tokenizer and template: the same wherever the files lie."""
        return self.manifest.inputs["model"]


def cache_store() -> Store:
    """Return the machine's own store of converted models: $OUTRIDER_CACHE or ~/.cache/outrider."""
    return Store(os.environ.get("OUTRIDER_CACHE") or str(Path.home() / ".cache" / "outrider"))


def find_model(settings: VerifierSettings) -> Path:
    """Return the local directory with the model's files, fetching or converting what has to be.

    Raises VerifierError when there is no such model.
    """
    source = settings.model
    packaged = source.startswith(PACKAGE_PREFIX)
    path = _package_file(source) if packaged else Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise VerifierError(f"verifier.model {source}: there is no file {path}")
        return _converted(path)
    if path.is_dir():
        return path
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise VerifierError(
            f"verifier.model {source!r} is neither a directory, a .gguf file, {PACKAGE_PREFIX}module/file "
            "nor a hub id of the form organization/name; correct the path"
        )
    return _from_hub(settings)


@stage_task
def load_verifier(store: Store, directory: str) -> StageResult:
    """Read a verifier's facts and its embedding, final norm and head: never more of it."""
    wanted = Identity(
        stage=VERIFIER, version=VERSION, settings={}, inputs={"model": identity(Path(directory))}
    )
    return build_parts(
        store, [wanted], "tasks.jobs.load_verifier", requests=[{"directory": directory}]
    )


def open_verifier(store: Store, directory: str, manifest: Manifest) -> Verifier:
    """Return the verifier that load_verifier published."""
    with artifacts.open_file(store, manifest, FACTS_FILE) as path:
        facts = VerifierFacts.model_validate(json.loads(path.read_text())["facts"])
    return Verifier(directory=directory, facts=facts, manifest=manifest)


def _package_file(source: str) -> Path:
    module, _, name = source.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or spec.origin is None:
        raise VerifierError(
            f"verifier.model {source}: no package {module!r} is installed; install it or give a path"
        )
    return Path(spec.origin).parent / name


def _converted(gguf: Path) -> Path:
    """Convert a GGUF file once; the result lies in the machine's cache under the file's digest."""
    store = cache_store()
    store.check_writable()
    wanted = Identity(
        stage=CONVERTED,
        version=CONVERT_VERSION,
        settings={},
        inputs={"gguf": digest_file(gguf)},
    )
    converted = build_parts(
        store, [wanted], "tasks.jobs.convert_gguf", requests=[{"gguf": str(gguf)}]
    )
    if not converted.reused:
        logger.info("converted %s to safetensors, once, into %s", gguf.name, store.url)
    directory = artifacts.local_directory(store, converted.parts[0])
    if directory is None:
        raise VerifierError(f"OUTRIDER_CACHE {store.url} has to be a local directory")
    return directory


def _from_hub(settings: VerifierSettings) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that a local model saves
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    patterns = [p for p in HUB_FILES if settings.trust_remote_code or p != "*.py"]
    try:
        return Path(
            snapshot_download(settings.model, revision=settings.revision, allow_patterns=patterns)
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise VerifierError(
            f"verifier.model {settings.model!r} is no directory here and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); correct the name or copy the model here"
        ) from error
