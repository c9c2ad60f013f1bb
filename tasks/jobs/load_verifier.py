"""Job of load_verifier: read the three tensors and publish them with the facts."""

import json
from pathlib import Path
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import FACTS_FILE, HEAD_FILE
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.eagle3.head import read_head, save_head
from tasks.eagle3.verifier import read_facts
from tasks.engines.remote_code import admit


def run(request: dict[str, Any], _progress: ProgressCallback) -> dict[str, Any]:
    """Publish the verifier artifact of the model in `request["directory"]`, unless it needs code that may not run."""
    wanted = Identity(**request["identity"])
    directory = Path(request["directory"])
    admit(directory, trusted=request["trust_remote_code"])
    facts = read_facts(directory)
    head = read_head(directory, facts)
    with artifacts.write(Store(request["store"]), wanted) as writer:
        with writer.file(HEAD_FILE) as path:
            save_head(head, path)
        record = {"identity": wanted.inputs["model"], "facts": facts.model_dump(mode="json")}
        writer.add_bytes(FACTS_FILE, json.dumps(record, indent=1, sort_keys=True).encode())
        writer.publish(
            rows=3,
            facts={
                "model type": facts.model_type,
                "hidden size": facts.hidden_size,
                "layers": facts.num_hidden_layers,
                "vocabulary": facts.vocab_size,
                "tied head": facts.tied,
                **request.get("digests", {}),
            },
        )
    return {}
