"""Check every artifact of a store: sizes, or with `deep` every byte against its digest."""

from collections.abc import Mapping

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import MANIFEST_NAME
from storage.store import Store


def verify_store(
    url: str, *, deep: bool, repair: bool = False, expected: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Return the number of artifacts and one sentence for each thing that is wrong.

    `expected` says who refers to which artifacts: those have to be there.
    Changes nothing, unless `repair` sets aside what is wrong: the next run makes that anew.
    """
    store = Store(url)
    if not store.is_there():
        raise ValueError(f"there is no store at {store.url}; correct the settings' store")
    suffix = f"/{MANIFEST_NAME}"
    paths = sorted(name.removesuffix(suffix) for name in store.sizes("") if name.endswith(suffix))
    problems = [
        f"{path}: it is missing, and {owner} refers to it; run its settings again to make it anew"
        for path, owner in (expected or {}).items()
        if path not in set(paths)
    ]
    for path in paths:
        found = _problems(store, path, deep=deep)
        problems += found
        if found and repair:
            artifacts.set_aside(store, path, problem="; ".join(found))
    return len(paths), problems


def _problems(store: Store, path: str, *, deep: bool) -> list[str]:
    try:
        manifest = artifacts.peek(store, path)
        found = [f"{path}: {one}" for one in artifacts.verify(store, manifest, deep=deep)]
    except (ArtifactError, FileNotFoundError) as error:
        found = [str(error)]
    # else a live run has let go of it since the store was listed
    return found if store.size(f"{path}/{MANIFEST_NAME}") is not None else []
