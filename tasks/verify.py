"""Check every artifact of a store: sizes, or with `deep` every byte against its digest."""

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import MANIFEST_NAME
from storage.store import Store


def verify_store(url: str, *, deep: bool) -> tuple[int, list[str]]:
    """Return the number of artifacts and one sentence for each thing that is wrong. Changes nothing."""
    store = Store(url)
    if not store.is_there():
        raise ValueError(f"there is no store at {store.url}; correct the settings' store")
    suffix = f"/{MANIFEST_NAME}"
    paths = sorted(name.removesuffix(suffix) for name in store.sizes("") if name.endswith(suffix))
    problems = []
    for path in paths:
        try:
            manifest = artifacts.peek(store, path)
        except ArtifactError as error:
            problems.append(str(error))
            continue
        problems += [f"{path}: {p}" for p in artifacts.verify(store, manifest, deep=deep)]
    return len(paths), problems
