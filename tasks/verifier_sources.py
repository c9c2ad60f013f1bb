"""Where a verifier comes from: a directory, a package's GGUF file, a bucket, the hub. Free of Prefect and torch.

`open_model` reads names, sizes and headers where the files lie; `find_model` brings the files to this machine,
after what can be refused has been refused.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from pydantic import Field

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERTED, MIRRORS
from storage.manifest import digest_file
from storage.mirror import Mirror, check_room
from storage.remote_files import RemoteFiles
from storage.store import Store, StoreError
from tasks.eagle3.model_files import CONFIG_FILE, LocalFiles, ModelFiles, VerifierError, small_files
from tasks.eagle3.remote_code import refuse_remote_code
from tasks.eagle3.verifier import read_facts
from tasks.eagle3.weight_files import weight_file_names
from tasks.progress import count_bytes
from tasks.stage_settings import StageSettings

logger = logging.getLogger(__name__)

CONVERT_VERSION = 1
PACKAGE_PREFIX = "package://"
LOCAL_PREFIX = "file://"
HUB_PREFIX = "hf://"


class VerifierSettings(StageSettings):
    """The model whose drafts are trained."""

    resources: ClassVar[frozenset[str]] = frozenset({"model", "revision"})

    model: str = Field(min_length=1)
    """A directory, its URL (s3://, gs://, az://), a hub id, a .gguf file or `package://module/file` (a file inside
    an installed package). What is remote is copied once into this machine's cache."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Whether code that the model's files bring along may run; it does only where transformers has none of its own."""
    full_digests: bool = False
    """Whether every byte of the weights tells models apart: minutes for large ones at each run. Else a sample of each
    file larger than 1 GiB does."""


def cache_directory() -> Path:
    """Return where this machine keeps converted and copied models: $OUTRIDER_CACHE or ~/.cache/outrider."""
    found = os.environ.get("OUTRIDER_CACHE") or str(Path.home() / ".cache" / "outrider")
    if "://" in found:
        raise VerifierError(
            f"OUTRIDER_CACHE is {found}; models are loaded from it: name a local directory"
        )
    return Path(found).expanduser()


def find_model(settings: VerifierSettings) -> Path:
    """Return the local directory with the model's files, fetching or converting what has to be.

    Raises VerifierError when there is no such model, or it cannot be used: before anything is fetched.
    """
    files = open_model(settings)
    read_facts(files)
    refuse_untrusted(files, settings)
    if isinstance(files, LocalFiles):
        return files.path
    names = needed_files(files, code=settings.trust_remote_code)
    if "://" in settings.model:
        return mirror_files(files, names)
    return _fetch_from_hub(settings, files, names)


def open_model(settings: VerifierSettings) -> LocalFiles | RemoteFiles:
    """Return the model's files where they lie: of a bucket or the hub nothing but a listing is read.

    Raises VerifierError when there is no such model.
    """
    path = local_path(settings)
    if path is not None:
        return _open_path(settings.model, path)
    if "://" in settings.model:
        return _open_url(settings.model)
    return _open_hub(settings)


def check_local(settings: VerifierSettings) -> None:
    """Refuse a model on this machine that cannot be used: in milliseconds, before anything is started for it.

    Raises VerifierError. What lies elsewhere, and what has to be converted first, is left to `find_model`.
    """
    path = local_path(settings)
    if path is None:
        return
    _check_path(settings.model, path)
    if path.is_dir():
        files = LocalFiles(path)
        read_facts(files)
        refuse_untrusted(files, settings)


def named_for_others(settings: VerifierSettings) -> VerifierSettings:
    """Return the settings as another process finds the same model by them, wherever it was started."""
    path = local_path(settings)
    if path is None or settings.model.startswith(PACKAGE_PREFIX):
        return settings
    return settings.model_copy(update={"model": str(path.absolute())})


def refuse_untrusted(files: ModelFiles, settings: VerifierSettings) -> None:
    """Raise VerifierError when the model needs code of its own files and that is not trusted."""
    if not settings.trust_remote_code:
        refuse_remote_code(files)


def needed_files(files: ModelFiles, *, code: bool) -> list[str]:
    """Return the names of the files that a model is loaded from; `code` adds its Python files."""
    return sorted([*weight_file_names(files), *small_files(files, code=code)])


def local_path(settings: VerifierSettings) -> Path | None:
    """Return the path on this machine that the settings name; None for the URL of a bucket and for a hub id."""
    source = settings.model
    if source.startswith(PACKAGE_PREFIX):
        return _package_file(source)
    if "://" in source and not source.startswith(LOCAL_PREFIX):
        return None
    path = Path(source.removeprefix(LOCAL_PREFIX)).expanduser()
    is_path = path.exists() or path.suffix == ".gguf" or source.startswith((".", "/", "~"))
    return path if is_path or source.count("/") != 1 else None


def _open_path(source: str, path: Path) -> LocalFiles:
    _check_path(source, path)
    return LocalFiles(_converted(path) if path.suffix == ".gguf" else path)


def _check_path(source: str, path: Path) -> None:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise VerifierError(f"verifier.model {source}: there is no file {path}")
    elif not path.is_dir():
        raise VerifierError(
            f"verifier.model {source!r} is neither a directory, a .gguf file, {PACKAGE_PREFIX}module/file, "
            "the URL of a directory nor a hub id of the form organization/name; correct the path"
        )


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
    from tasks.stage import build_parts  # noqa: PLC0415 - Prefect, which only this kind of source needs

    store = Store(str(cache_directory()))
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
        raise RuntimeError(f"the converted {gguf.name} in {store.url} lies in several attempts")
    return directory


def _open_url(url: str) -> RemoteFiles:
    try:
        return RemoteFiles(url)
    except (ValueError, FileNotFoundError) as error:
        raise VerifierError(
            f"verifier.model {url}: {error}; correct the URL of the model's directory"
        ) from error


def mirror_files(files: RemoteFiles, names: Sequence[str]) -> Path:
    """Return a local directory with these files of a remote one, copied into this machine's cache once."""
    mirror = Mirror(files, names, root=cache_directory() / MIRRORS)
    return mirror.fetch(count_bytes("copy model", mirror.missing_bytes))


def _open_hub(settings: VerifierSettings) -> LocalFiles | RemoteFiles:
    """Return the files on the hub; without a connection to it, those that its cache has here."""
    from huggingface_hub import constants  # noqa: PLC0415 - half a second that a local model saves

    url = f"{HUB_PREFIX}{settings.model}"
    if settings.revision:
        url += f"@{quote(settings.revision, safe='')}"
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        return RemoteFiles(url)
    except (StoreError, OSError, ValueError) as error:
        cached = _cached_snapshot(settings)
        if cached is None:
            raise VerifierError(_not_on_hub(settings, error.__cause__ or error)) from error
        logger.info("the hub cannot be asked; its cache here has %s", settings.model)
        return LocalFiles(cached)


def _cached_snapshot(settings: VerifierSettings) -> Path | None:
    """Return the directory of the hub's own cache; which weights are missing there, their index says."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        found = snapshot_download(
            settings.model,
            revision=settings.revision,
            allow_patterns=[CONFIG_FILE],
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def _fetch_from_hub(settings: VerifierSettings, files: RemoteFiles, names: list[str]) -> Path:
    from huggingface_hub import (  # noqa: PLC0415
        constants,
        snapshot_download,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    revision = settings.revision
    missing_bytes = sum(
        files.sizes[name]
        for name in names
        if not isinstance(try_to_load_from_cache(settings.model, name, revision=revision), str)
    )
    check_room(Path(constants.HF_HUB_CACHE), missing_bytes, variable="HF_HUB_CACHE")
    try:
        return Path(snapshot_download(settings.model, revision=revision, allow_patterns=names))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise VerifierError(_not_on_hub(settings, error)) from error


def _not_on_hub(settings: VerifierSettings, error: BaseException) -> str:
    revision = f" (revision {settings.revision})" if settings.revision else ""
    cause = (str(error).splitlines() or [""])[0]
    return (
        f"verifier.model {settings.model!r}{revision} is no directory here and could not be fetched from the hub "
        f"({type(error).__name__}: {cause}); correct the name or copy the model here"
    )
