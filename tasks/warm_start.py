"""Stage warm_start: a speculators checkpoint -> the tensors that training starts from, checked against the draft."""

from pathlib import Path

from storage.artifacts import Identity
from storage.layout import MANIFEST_NAME, WARM_START
from storage.manifest import canonical_digest, digest_file
from storage.remote_files import RemoteFiles
from storage.store import Store
from tasks.eagle3.draft_plan import DraftPlan
from tasks.eagle3.model_files import CONFIG_FILE, LocalFiles, read_json_object
from tasks.eagle3.weight_files import weight_file_names
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.verifier_sources import LOCAL_PREFIX, mirror_files

VERSION = 1
MODULE = "tasks.jobs.warm_start"


@stage_task
def warm_start(
    store: Store,
    layer_ids: tuple[int, ...],
    *,
    source: str,
    verifier: Verifier,
    draft: DraftPlan,
) -> StageResult:
    """Take the trainable tensors out of the checkpoint `source` (train.init), unless it is another kind of draft."""
    directory = find_checkpoint(source)
    wanted = Identity(
        stage=WARM_START,
        version=VERSION,
        settings={"draft": draft.identity(), "layers": list(layer_ids)},
        inputs={"checkpoint": _digest(directory)},
    )
    request = {
        "source": source,
        "checkpoint": str(directory),
        "verifier": verifier.manifest.path,
        "draft": draft.model_dump(mode="json"),
        "layer_ids": list(layer_ids),
    }
    return build_parts(store, [wanted], MODULE, requests=[request])


def find_checkpoint(source: str) -> Path:
    """Return the local directory of a speculators checkpoint; a remote one is copied into this machine's cache.

    `source` is the directory or its URL; the directory of a store's artifact that holds one will do.
    Raises ValueError when there is no such checkpoint.
    """
    files = _open(source)
    if CONFIG_FILE not in files.sizes and MANIFEST_NAME in files.sizes:
        entries = read_json_object(files, MANIFEST_NAME)["files"].values()
        attempt = next(iter(entries))["path"].split("/")[0]
        files = _open(f"{source.rstrip('/')}/{attempt}")
    if CONFIG_FILE not in files.sizes:
        raise ValueError(
            f"train.init {source}: there is no {CONFIG_FILE}; name the directory of a speculators checkpoint, "
            "such as the speculator of an earlier run"
        )
    names = [CONFIG_FILE, *weight_file_names(files)]
    return files.path if isinstance(files, LocalFiles) else mirror_files(files, names)


def _open(source: str) -> LocalFiles | RemoteFiles:
    if "://" in source and not source.startswith(LOCAL_PREFIX):
        try:
            return RemoteFiles(source)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"train.init {source}: {error}; correct the URL") from error
    path = Path(source.removeprefix(LOCAL_PREFIX)).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(
            f"train.init {source} is no directory; correct the path (a checkpoint on the hub is "
            "written hf://organization/name)"
        )
    return LocalFiles(path)


def _digest(directory: Path) -> str:
    """Digest of config and weights: every byte, for a draft is small."""
    names = [CONFIG_FILE, *weight_file_names(LocalFiles(directory))]
    return canonical_digest({name: digest_file(directory / name) for name in names})
