"""The names in a store, in one place.

<stage>/<key>/manifest.json                      an artifact, complete because its manifest is there
<stage>/<key>/attempt-<time>-<random>/<file>     its files
states/<capture key>/<shard key>/...             captured shards, one artifact each
checkpoints/<train key>/steps/step-<n>/...       training checkpoints, one artifact each
checkpoints/<train key>/best/step-<n>/...        best weights, which many checkpoints share
checkpoints/<train key>/metrics/entries-<a>-<b>/ metrics [a, b) of the past, which all later ones share
drafts/<verifier>/current.json                   which draft is in service
drafts/<verifier>/promotions/<time>-<random>.json  each that ever was, and why
run_records/<run>.json                           what each run did
trained/<settings>.json                          what the last completed run of these settings was trained on
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
WARM_START = "warm_start"
"""Tensors of an earlier draft that a training starts from."""
BATCH_SIZES = "batch_sizes"
"""How large a batch of a training can be."""
CHECKPOINTS = "checkpoints"
REFERENCE = "reference"
"""Greedy texts of the verifier alone, which every draft's texts must equal."""
EVALUATION = "evaluation"
DECISION = "decision"
"""Whether a draft is better than the one in service."""
SPECULATOR = "speculator"
DRAFTS = "drafts"
RUN_RECORDS = "run_records"
TRAINED = "trained"

CONVERTED = "converted"
"""Model directories made from other formats; in the machine's own cache store."""
MIRRORS = "mirrors"
"""Copies of remote model directories; in the machine's own cache."""

FACTS_FILE = "facts.json"
HEAD_FILE = "head.safetensors"
CONVERSATIONS_TABLE = "conversations.parquet"
SAMPLES_TABLE = "samples.parquet"
SHARDS_TABLE = "shards.parquet"
STATES_FILE = "states.safetensors"
ROWS_TABLE = "rows.parquet"
SPLIT_TABLE = "split.parquet"
VOCAB_FILE = "vocab_map.safetensors"
DRAFT_FILE = "draft.safetensors"
METRICS_TABLE = "metrics.parquet"
EVALUATION_TABLE = "evaluation.parquet"
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
ENTRIES_FILE = "entries.json"

STAGE_DIRECTORIES = (
    VERIFIER, WARM_START, CONVERSATIONS, REGENERATED, SAMPLES, SPLIT, VOCAB_MAP, BATCH_SIZES, STATES, CHECKPOINTS,
    EVALUATION, SPECULATOR, DECISION,
)  # fmt: skip
"""Directories that hold artifacts, in the order of the pipeline."""

STEPS, BESTS, SEGMENTS = CHECKPOINT_PLACES = ("steps", "best", "metrics")
"""Beside a trained draft: what its training goes on from."""

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
    return f"{CHECKPOINTS}/{_part(train_key)}/{STEPS}"


def checkpoint_directory(train_key: str, step: int) -> str:
    """Where the checkpoint after optimizer step `step` lies; ValueError when negative."""
    if step < 0:
        raise ValueError(f"a training step is 0 or more, not {step}")
    return f"{steps_directory(train_key)}/step-{step:09d}"


def bests_directory(train_key: str) -> str:
    """Where the best weights of one training lie."""
    return f"{CHECKPOINTS}/{_part(train_key)}/{BESTS}"


def best_directory(train_key: str, step: int) -> str:
    """Where the weights after optimizer step `step` lie, which were the best until then."""
    return f"{bests_directory(train_key)}/step-{step:09d}"


def segments_directory(train_key: str) -> str:
    """Where the metrics of one training lie, in segments."""
    return f"{CHECKPOINTS}/{_part(train_key)}/{SEGMENTS}"


def metrics_directory(train_key: str, start: int, stop: int) -> str:
    """Where the entries [start, stop) of a training's metrics lie."""
    return f"{segments_directory(train_key)}/entries-{start:09d}-{stop:09d}"


def is_step(name: str) -> bool:
    """Tell whether it is the name of a checkpoint's directory."""
    return _STEP.fullmatch(name) is not None


def parse_step(name: str) -> int:
    """The step of a checkpoint's directory name ("step-000000120" -> 120).

    ValueError for any other name.
    """
    match = _STEP.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint such as 'step-000000120'")
    return int(match[1])


def draft_pointer(draft: str) -> str:
    """The file that says which draft of that name is in service."""
    return f"{_draft_directory(draft)}/current.json"


def promotions_directory(draft: str) -> str:
    """Where all promotions of a draft of that name lie."""
    return f"{_draft_directory(draft)}/promotions"


def promotion_file(draft: str, promotion: str) -> str:
    """The file of one promotion."""
    return f"{promotions_directory(draft)}/{_part(promotion)}.json"


def _draft_directory(draft: str) -> str:
    return f"{DRAFTS}/{_draft_part(draft)}"


def _draft_part(draft: str) -> str:
    """Other characters of the name than those of paths become '-'."""
    return _part(re.sub(r"[^A-Za-z0-9._-]+", "-", draft).strip("-."))


def run_record(run_id: str) -> str:
    """The file that says what one run did."""
    return f"{RUN_RECORDS}/{_part(run_id)}.json"


def trained_file(name: str, draft: str) -> str:
    """The file that says what the last completed run of the settings of that name, for that draft, was trained on."""
    return f"{TRAINED}/{_part(name)}/{_draft_part(draft)}.json"


def _part(name: str) -> str:
    if _SAFE.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be part of a path: use letters, digits, '.', '_' and '-'"
        )
    return name
