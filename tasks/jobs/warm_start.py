"""Job of warm_start: check the checkpoint against the run's draft and publish its trainable tensors."""

from pathlib import Path
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import DRAFT_FILE
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.eagle3.draft import draft_config, trainable_shapes
from tasks.eagle3.draft_plan import DraftPlan
from tasks.eagle3.warm_start import check_speculator, read_trainable
from tasks.jobs.verifiers import open_facts


def run(request: dict[str, Any], _progress: ProgressCallback) -> dict[str, Any]:
    """Publish the tensors of one checkpoint, under the names and in the dtype that it has them."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    facts = open_facts(store, artifacts.require(store, request["verifier"]))
    draft, directory = DraftPlan.model_validate(request["draft"]), Path(request["checkpoint"])
    layer_ids = request["layer_ids"]
    theirs = check_speculator(
        directory, draft=draft, text_config=facts.text_config, layer_ids=layer_ids
    )
    config = draft_config(
        facts.text_config,
        draft_vocab_size=facts.vocab_size,  # nothing that trains depends on it
        layer_ids=layer_ids,
        settings=draft.settings,
        layer=draft.layer,
        verifier_name_or_path="",
        verifier_architectures=facts.architectures,
        draft_tokens=1,
    )
    tensors = read_trainable(directory, trainable_shapes(config))
    with artifacts.write(store, wanted) as writer:
        writer.add_tensors(DRAFT_FILE, tensors)
        writer.publish(
            rows=len(tensors),
            facts={
                "checkpoint": request["source"],
                "parameters": sum(value.numel() for value in tensors.values()),
                "draft vocabulary": theirs.get("draft_vocab_size"),
            },
        )
    return {}
