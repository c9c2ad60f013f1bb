"""What every stage has in common: its task options, its result, and the "Reused" state of a hit.

A stage's task looks its artifact up by identity, and computes and publishes it only when it is not there.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from storage import artifacts
from storage.artifacts import ArtifactError, Identity
from storage.manifest import Manifest, canonical_digest
from storage.store import Store
from tasks.child import Child, ProgressCallback
from tasks.gpus import GpuNeed, claim_gpus, warn_of_leftovers
from tasks.progress import ProgressMeter

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2
RETRY_SECONDS = [2.0, 10.0]


announce: ContextVar[Callable[[list[str]], None]] = ContextVar(
    "announce", default=lambda _paths: None
)
"""Is told which artifacts a stage is about to make, by their paths: an unfinished run's own work."""


@dataclass(frozen=True)
class StageResult:
    """What a stage leaves behind: one manifest for each of its parts, and whether all were there before."""

    parts: tuple[Manifest, ...]
    reused: bool
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """Digest of the content of all parts, in order: what later stages depend on."""
        if len(self.parts) == 1:
            return self.parts[0].content
        return canonical_digest([part.content for part in self.parts])

    @property
    def key(self) -> str:
        """Key of the artifact, or a digest of the parts' keys."""
        if len(self.parts) == 1:
            return self.parts[0].key
        return canonical_digest([part.key for part in self.parts])[:24]

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def seconds(self) -> float:
        """Seconds that computing the parts took, whenever that was."""
        return sum(part.seconds for part in self.parts)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of a stage with one part."""
        return self.parts[0].facts


def worth_a_retry(task: Any, _run: Any, state: State[Any]) -> bool:
    """Tell whether a failed task run is worth another try: wrong input stays wrong, lost input is lost."""
    try:
        state.result()
    except (ValueError, ArtifactError):
        return False
    except Exception as error:
        logger.warning("%s failed and is tried again: %s", task.name, " ".join(str(error).split()))
        return True
    return False


def stage_task(function: Callable[P, StageResult]) -> Task[P, Any]:
    """Make a stage's function a Prefect task named after it, with retries and without Prefect's own cache.

    A result that was there before becomes `Completed(name="Reused")`, so the UI shows what was computed.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = function(*args, **kwargs)
        return Completed(name="Reused", data=result) if result.reused else result

    return task(
        name=function.__name__,
        task_run_name=function.__name__,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=RETRIES,
        retry_delay_seconds=RETRY_SECONDS,
        retry_condition_fn=worth_a_retry,
    )(run)


def build_parts(
    store: Store,
    wanted: Sequence[Identity],
    module: str,
    *,
    requests: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
    gpus: GpuNeed | None = None,
) -> StageResult:
    """Find every artifact of `wanted`; let one child process compute and publish the missing, in order.

    `module` gets `requests[i]` with the store's URL and the identity added. Its progress messages
    `{"stage", "done", "total", "unit", "note"}` become log records here. What a killed run has published
    stays: the next one goes on behind it. `gpus` are those that the stage computes on where there are any.
    """
    parts = [artifacts.find(store, identity) for identity in wanted]
    missing = [index for index, part in enumerate(parts) if part is None]
    if missing and len(wanted) > 1:
        name = wanted[0].stage
        logger.info("%s: %d of %d parts done", name, len(wanted) - len(missing), len(wanted))
    if missing:
        announce.get()([identity.path for identity in wanted])
        if gpus is not None:
            claim_gpus(gpus, stage=module.rsplit(".", 1)[-1])
        child = Child(module, environment)
        try:
            with child:
                _make(store, child, wanted, requests, parts)
        finally:
            warn_of_leftovers({child.pid})
    return StageResult(tuple(part for part in parts if part is not None), reused=not missing)


def _make(
    store: Store,
    child: Child,
    wanted: Sequence[Identity],
    requests: Sequence[Mapping[str, Any]],
    parts: list[Manifest | None],
) -> None:
    """Let the child make the parts that are None, in their order, and put them in."""
    show = _progress_to_log()
    for index, identity in enumerate(wanted):
        if parts[index] is not None:
            continue
        child.request({**requests[index], "store": store.url, "identity": asdict(identity)}, show)
        parts[index] = artifacts.find(store, identity)
        if parts[index] is None:
            raise RuntimeError(
                f"{child.module} ended well but left no complete artifact at {identity.path}"
            )


def _progress_to_log() -> ProgressCallback:
    meters: dict[str, ProgressMeter] = {}

    def show(message: dict[str, Any]) -> None:
        stage = message["stage"]
        if stage not in meters:
            meters[stage] = ProgressMeter(
                stage, message["total"], message["unit"], done=message["done"]
            )
        meters[stage].set(message["done"], message.get("note", ""))

    return show


def call(stage: Task[..., Any], *args: Any, **kwargs: Any) -> StageResult:
    """Run a stage outside of any flow, without a Prefect server, and return its result."""
    result: Any = stage.fn(*args, **kwargs)
    found: Any = result.data if isinstance(result, State) else result
    if not isinstance(found, StageResult):
        raise TypeError(f"stage {stage.name} gave a {type(found).__name__}, no StageResult")
    return found
