"""Job of fit_batch: try batches on the GPU and publish the largest that fits."""

from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.eagle3.batch_fit import LARGEST_TOKENS, fits_gpu, largest_fitting, usable_bytes
from tasks.eagle3.training_settings import TrainSettings
from tasks.jobs.drafts import CPU, make_draft
from tasks.jobs.models import resolve_device
from tasks.jobs.verifiers import open_facts


def run(request: dict[str, Any], _progress: ProgressCallback) -> dict[str, Any]:
    """Publish the batch size of one kind of training: the artifact's rows, in tokens."""
    import torch

    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings = TrainSettings.model_validate(request["settings"])
    device = resolve_device(settings.device)
    draft = make_draft(store, request["draft_parts"], seed=settings.seed, device=device, tables=CPU)
    verifier = artifacts.require(store, request["draft_parts"]["verifier"])
    transform = open_facts(store, verifier).transform
    room_bytes = usable_bytes(device)
    tokens = largest_fitting(
        lambda size: fits_gpu(draft, settings, transform, size, room_bytes=room_bytes),
        smallest=settings.max_tokens,
        largest=LARGEST_TOKENS,
    )
    with artifacts.write(store, wanted) as writer:
        writer.publish(rows=tokens, facts={"gpu": torch.cuda.get_device_name(device)})
    return {}
