"""Sub-flow: plan the missing rows and fan out over worker processes; each shard is a task run."""

from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.run_log import send_log_to_prefect
from storage import artifacts
from storage.manifest import Manifest
from storage.store import Store
from tasks.capture import MODULE, CaptureSettings, capture_shard, open_plan
from tasks.load_verifier import Verifier, open_verifier
from tasks.progress import ProgressMeter
from tasks.worker_pool import WorkerPool


@flow(name="capture-states", persist_result=False)
def capture_states(
    store: str,
    plan: str,
    verifier: str,
    *,
    verifier_directory: str,
    settings: CaptureSettings,
    trust_remote_code: bool = False,
    verifier_files: dict[str, tuple[int, int]] | None = None,
) -> None:
    """Capture every shard of a published plan; what is there already is not computed again.

    Args:
        store: URL of the store.
        plan: path of the capture plan in the store.
        verifier: path of the verifier's artifact in the store.
        verifier_directory: where the verifier's files lie on the machine that captures.
        settings: how to capture.
        trust_remote_code: whether code that the verifier's files bring along may run.
        verifier_files: bytes and time of change of each of these files; by default as they are now.
    """
    send_log_to_prefect()
    opened = Store(store)
    work = open_plan(opened, plan)
    model = open_verifier(
        opened,
        verifier_directory,
        artifacts.require(opened, verifier),
        trust_remote_code=trust_remote_code,
        files=verifier_files,
    )
    meter = ProgressMeter("capture", sum(work.tokens), "tokens")
    pool = WorkerPool(
        MODULE, processes=settings.processes, gpus_per_process=settings.gpus_per_process
    )
    with pool:
        futures = [
            capture_shard.submit(
                opened, work, rows, verifier=model, settings=settings, pool=pool, meter=meter
            )
            for rows in work.ranges
        ]
        for future in futures:
            future.result()


def run_capture(
    store: Store, plan: Manifest, verifier: Verifier, settings: CaptureSettings
) -> None:
    """Run the sub-flow with as many threads as there are worker processes."""
    runner: Any = ThreadPoolTaskRunner(max_workers=settings.processes)
    name = f"capture {plan.rows:,} samples"
    capture_states.with_options(task_runner=runner, flow_run_name=name)(
        store=store.url,
        plan=plan.path,
        verifier=verifier.manifest.path,
        verifier_directory=verifier.directory,
        settings=settings,
        trust_remote_code=verifier.trust_remote_code,
        verifier_files=dict(verifier.files),
    )
