"""The pipeline up to its captured states, in this process."""

from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.capture_states import run_capture
from flows.settings import parse_settings
from storage import artifacts
from storage.layout import ROWS_TABLE, SAMPLES_TABLE, STATES, capture_directory
from storage.manifest import Manifest
from storage.store import Store
from storage.tables import read_table
from tasks.capture import capture, plan_capture
from tasks.collect import collect
from tasks.load_verifier import load_verifier, open_verifier
from tasks.stage import StageResult, call
from tasks.tokenize_chats import tokenize_chats
from tests.tiny_runs import Values


def capture_only(values: Values, api: str) -> tuple[StageResult, StageResult]:
    """Collect, tokenize and capture by these settings; returns the samples and the shards with their states."""
    settings = parse_settings(values)
    store, model = Store(settings.store), settings.verifier
    loaded = call(load_verifier, store, model.model)
    verifier = open_verifier(store, model.model, loaded.parts[0])
    conversations = call(collect, store, settings.data)
    samples = call(tokenize_chats, store, conversations, verifier, settings.tokenize, 0.01)
    plan = plan_capture(store, samples, verifier, settings.capture, 0.01)

    @flow
    def local() -> None:
        if plan is not None:
            run_capture(
                store,
                plan,
                verifier,
                settings.capture,
                model,
                samples=samples.rows,
                max_dropped=0.01,
            )

    with temporary_settings(updates={PREFECT_API_URL: api}):
        local()
    states = call(capture, store, samples, verifier, settings.capture, 0.01, reused=plan is None)
    return samples, states


def shards_in(store: Store) -> dict[str, Manifest]:
    """All captured shards of a store, by their paths."""
    return {
        shard.path: shard
        for key in store.directories(STATES)
        for shard in artifacts.list_manifests(store, capture_directory(key))
    }


def sample_ids(store: Store, shard: Manifest) -> list[str]:
    """Ids of a shard's samples."""
    with artifacts.open_file(store, shard, ROWS_TABLE) as path:
        ids: list[str] = read_table(path).column("sample_id").to_pylist()
    return ids


def tokens_and_masks(store: Store, samples: StageResult) -> dict[str, tuple[list[int], list[bool]]]:
    """Token ids and loss mask of each sample, by its id."""
    found = {}
    for part in samples.parts:
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            for row in read_table(path).to_pylist():
                found[row["sample_id"]] = row["input_ids"], row["loss_mask"]
    return found
