"""The names in a store, in one place.

<stage>/<key>/manifest.json                      an artifact, complete because its manifest is there
<stage>/<key>/attempt-<time>-<random>/<file>     its files
states/<capture key>/<shard key>/...             captured shards, one artifact each
checkpoints/<train key>/steps/step-<n>/...       training checkpoints, one artifact each
drafts/<verifier>/current.json                   which draft is in service
run_records/<run>.json                           what each run did
<tracker>/<train key>/...                        what a tracker such as tensorboard keeps on this disk
"""

import re

MANIFEST_NAME = "manifest.json"

VERIFIER = "verifier"
CONVERSATIONS = "conversations"
REGENERATED = "regenerated"
SAMPLES = "samples"
STATES = "states"
CAPTURE_PLAN = "capture_plan"
SPLIT = "split"
VOCAB_MAP = "vocab_map"
CHECKPOINTS = "checkpoints"
REFERENCE = "reference"
"""Greedy texts of the verifier alone, which every draft's texts must equal."""
EVALUATION = "evaluation"
SPECULATOR = "speculator"
DRAFTS = "drafts"
RUN_RECORDS = "run_records"

CONVERTED = "converted"
"""Model directories made from other formats; in the machine's own cache store."""
MIRRORS = "mirrors"
"""Copies of remote model directories; in the machine's own cache."""

FACTS_FILE = "facts.json"
HEAD_FILE = "head.safetensors"
CONVERSATIONS_TABLE = "conversations.parquet"
SAMPLES_TABLE = "samples.parquet"
PLAN_TABLE = "plan.parquet"
STATES_FILE = "states.safetensors"
ROWS_TABLE = "rows.parquet"
SPLIT_TABLE = "split.parquet"
VOCAB_FILE = "vocab_map.safetensors"
DRAFT_FILE = "draft.safetensors"
METRICS_TABLE = "metrics.parquet"
EVALUATION_TABLE = "evaluation.parquet"
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"

STAGE_DIRECTORIES = (
    VERIFIER, CONVERSATIONS, REGENERATED, SAMPLES, STATES, SPLIT, VOCAB_MAP, CHECKPOINTS,
    EVALUATION, SPECULATOR,
)  # fmt: skip
"""Directories that hold artifacts, in the order of the pipeline."""

_STEP = re.compile(r"step-(\d{9,})")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def capture_directory(capture_key: str) -> str:
    """Where all shards of one capture identity lie."""
    return f"{STATES}/{_part(capture_key)}"


def shard_directory(capture_key: str, shard_key: str) -> str:
    """Where one captured shard lies."""
    return f"{capture_directory(capture_key)}/{_part(shard_key)}"


def steps_directory(train_key: str) -> str:
    """Where all checkpoints of one training lie."""
    return f"{CHECKPOINTS}/{_part(train_key)}/steps"


def checkpoint_directory(train_key: str, step: int) -> str:
    """Where the checkpoint after optimizer step `step` lies; ValueError when negative."""
    if step < 0:
        raise ValueError(f"a training step is 0 or more, not {step}")
    return f"{steps_directory(train_key)}/step-{step:09d}"


def parse_step(name: str) -> int:
    """The step of a checkpoint's directory name ("step-000000120" -> 120).

    ValueError for any other name.
    """
    match = _STEP.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint such as 'step-000000120'")
    return int(match[1])


def draft_pointer(verifier_name: str) -> str:
    """The file that says which draft of a verifier is in service.

    Other characters of the name become '-'.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", verifier_name).strip("-.")
    return f"{DRAFTS}/{_part(name)}/current.json"


def run_record(run_id: str) -> str:
    """The file that says what one run did."""
    return f"{RUN_RECORDS}/{_part(run_id)}.json"


def _part(name: str) -> str:
    if _SAFE.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be part of a path: use letters, digits, '.', '_' and '-'"
        )
    return name
