"""Sub-flow: fan out a plan's rows over worker processes; each shard is a task run.

It runs within the run that made the plan, or for a part of the rows as a run of its own on another machine.
"""

from contextlib import nullcontext
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.capture_nodes import capture_on_nodes, signs_of_life
from flows.run_end import explain_end
from flows.run_log import send_log_to_prefect
from storage import artifacts
from storage.manifest import Manifest
from storage.row_ranges import RowRange
from storage.store import Store
from tasks.capture import MODULE, capture_shard, open_plan
from tasks.capture_settings import CaptureSettings
from tasks.drop_budget import check_quarantined, quarantined_in
from tasks.gpus import GpuNeed, claim_gpus
from tasks.load_verifier import Verifier, check_same_model, open_verifier
from tasks.progress import ProgressMeter
from tasks.verifier_sources import VerifierSettings, find_model
from tasks.worker_pool import REQUESTS_PER_WORKER, WorkerPool

_runner: Any = ThreadPoolTaskRunner(max_workers=16)
"""Of a run on its own: as many threads as one machine has GPUs; those without a worker process wait."""


@flow(
    name="capture-states",
    persist_result=False,
    task_runner=_runner,
    on_failure=[explain_end],
    on_crashed=[explain_end],
)
def capture_states(
    store: str,
    plan: str,
    verifier: str,
    *,
    model: VerifierSettings,
    settings: CaptureSettings,
    rows: tuple[int, int] | None = None,
    verifier_directory: str | None = None,
    verifier_files: dict[str, tuple[int, int]] | None = None,
    samples: int | None = None,
    max_dropped: float = 1.0,
) -> None:
    """Capture the shards of a published plan; what is there already is not computed again.

    Args:
        store: URL of the store.
        plan: path of the capture plan in the store.
        verifier: path of the verifier's artifact in the store.
        model: where the verifier comes from; it has to be the one that the plan was made for.
        settings: how to capture.
        rows: rows [start, stop) of the plan to capture; by default all.
        verifier_directory: where the verifier's files lie, when they are known to be the right ones already.
        verifier_files: bytes and time of change of each of these files; by default as they are now.
        samples: samples of the whole run; by default those of the plan.
        max_dropped: largest share of them that may turn out without usable states before the capture is given up.
    """
    send_log_to_prefect()
    opened = Store(store)
    work = open_plan(opened, plan)
    ranges = work.ranges
    if rows is not None:
        ranges = work.missing(opened, work.within(RowRange(*rows)))
    meter = ProgressMeter("capture", work.tokens(ranges), "tokens")
    with nullcontext() if verifier_directory else signs_of_life(meter):
        loaded = artifacts.require(opened, verifier)
        if verifier_directory is None:
            verifier_directory = str(find_model(model))
            check_same_model(loaded, verifier_directory, full_digests=model.full_digests)
        opened_verifier = open_verifier(
            opened,
            verifier_directory,
            loaded,
            trust_remote_code=model.trust_remote_code,
            files=verifier_files,
        )
        need = GpuNeed(settings.device, settings.gpus, settings.gpu_policy)
        claimed = claim_gpus(need, stage="capture", group=settings.gpus_per_process)
        if claimed:
            settings = settings.model_copy(update={"gpus": claimed})
        pool = WorkerPool(
            MODULE, processes=settings.processes, gpus_per_process=settings.gpus_per_process
        )
        with pool:
            futures = [
                capture_shard.submit(
                    opened,
                    work,
                    shard,
                    verifier=opened_verifier,
                    settings=settings,
                    pool=pool,
                    meter=meter,
                )
                for shard in ranges
            ]
            quarantined: dict[str, str] = {}
            for future in futures:
                quarantined |= quarantined_in([future.result()])
                check_quarantined(
                    quarantined, samples or work.manifest.rows, max_dropped=max_dropped
                )


def run_capture(
    store: Store,
    plan: Manifest,
    verifier: Verifier,
    settings: CaptureSettings,
    model: VerifierSettings,
    *,
    samples: int,
    max_dropped: float,
) -> None:
    """Capture a plan on this machine, with as many threads as keep its worker processes busy, or on many."""
    if settings.nodes > 1:
        capture_on_nodes(store, plan, verifier, settings, model)
        return
    runner: Any = ThreadPoolTaskRunner(max_workers=REQUESTS_PER_WORKER * settings.processes)
    name = f"capture {plan.rows:,} samples"
    capture_states.with_options(task_runner=runner, flow_run_name=name)(
        store=store.url,
        plan=plan.path,
        verifier=verifier.manifest.path,
        model=model,
        settings=settings,
        verifier_directory=verifier.directory,
        verifier_files=dict(verifier.files),
        samples=samples,
        max_dropped=max_dropped,
    )
