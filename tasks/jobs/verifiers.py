"""Open what load_verifier has published; free of the draft's packages, which take seconds to import."""

import json

from storage import artifacts
from storage.layout import FACTS_FILE, HEAD_FILE
from storage.manifest import Manifest
from storage.store import Store
from tasks.eagle3.head import VerifierHead, load_head
from tasks.eagle3.verifier import VerifierFacts


def open_facts(store: Store, manifest: Manifest) -> VerifierFacts:
    """Return the facts of a published verifier."""
    with artifacts.open_file(store, manifest, FACTS_FILE) as path:
        return VerifierFacts.model_validate(json.loads(path.read_text())["facts"])


def open_head(store: Store, manifest: Manifest) -> VerifierHead:
    """Return the three tensors of a published verifier."""
    with artifacts.open_file(store, manifest, HEAD_FILE) as path:
        return load_head(path)
