"""The whole pipeline, top to bottom, one line per stage.

python -m flows.train_draft deployments/smollm2-demo.yaml
"""

import logging
import sys
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.capture_nodes import check_deployment
from flows.capture_states import run_capture
from flows.progress_artifacts import send_progress_to_prefect
from flows.run_end import explain_end
from flows.run_log import send_log_to_prefect
from flows.run_record import RunRecord
from flows.settings import PipelineSettings
from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import capture_directory
from storage.store import Store
from tasks.capture import capture, plan_capture
from tasks.child import kill_children
from tasks.collect import collect
from tasks.eagle3.draft_plan import check_file, plan_draft
from tasks.evaluate import Prompts, check_prompts, draft_recipe, evaluate
from tasks.export import export
from tasks.fingerprint import take_fingerprint
from tasks.fit_batch import fit_batch, needs_fitting, settle_batch
from tasks.gpus import check_there, stop_waiting
from tasks.load_verifier import load_verifier, open_verifier
from tasks.map_vocab import check_draft_size, map_vocab
from tasks.promote import promote
from tasks.regenerate import regenerate
from tasks.split import split
from tasks.tokenize_chats import tokenize_chats
from tasks.train import check_budget, train
from tasks.verifier_sources import find_model
from tasks.warm_start import warm_start

logger = logging.getLogger(__name__)

REBUILDS = 3
"""Artifacts that may turn out to be lost or corrupt in one run before it gives up."""

fetch_model = task(
    name="find_model", task_run_name="find_model", cache_policy=NO_CACHE, persist_result=False
)(find_model)


@flow(
    name="train-draft",
    flow_run_name="train-draft {settings.name}",
    persist_result=False,
    on_failure=[explain_end],
    on_crashed=[explain_end],
)
def train_draft(settings: PipelineSettings, run_id: str | None = None) -> dict[str, Any]:
    """Train, evaluate and export a draft model; reuses every artifact that is there.

    Args:
        settings: what to train and on what; the same as in a settings file.
        run_id: name of the run's record in the store; empty = made from the time.

    Returns:
        The run's record: stages with their state, the speculator's path, the acceptance length.
    """
    send_log_to_prefect()
    send_progress_to_prefect()
    store = Store(settings.store)
    store.check_writable()
    run = RunRecord(store, settings, run_id)
    try:
        return _rebuilding(run, store, settings)
    except BaseException as error:
        if not isinstance(error, Exception):  # stopped: no signal reaches the stages' threads
            kill_children()
            stop_waiting()
            logger.warning("stopped in %s; run the same again to go on there", run.record["at"])
        run.fail(error)
        raise


def _rebuilding(run: RunRecord, store: Store, settings: PipelineSettings) -> dict[str, Any]:
    """Run the stages; one that finds its input lost or corrupt has it set aside, and all go on from there."""
    for _ in range(REBUILDS):
        try:
            return _stages(run, store, settings)
        except ArtifactError as error:
            cause = str(error).split("; ", maxsplit=1)[0]
            logger.warning("%s; going through the stages again to make it anew", cause)
            run.begin_again()
    return _stages(run, store, settings)


def _stages(run: RunRecord, store: Store, settings: PipelineSettings) -> dict[str, Any]:
    check_file(settings.draft)
    check_there(settings.devices)
    check_deployment(settings.capture)
    directory = str(fetch_model.submit(settings.verifier).result())
    options = settings.verifier
    loaded = run.stage(
        load_verifier,
        store,
        directory,
        trust_remote_code=options.trust_remote_code,
        full_digests=options.full_digests,
    )
    verifier = open_verifier(
        store, directory, loaded.parts[0], trust_remote_code=options.trust_remote_code
    )
    check_draft_size(settings.vocab, verifier.facts.vocab_size)
    draft = plan_draft(settings.draft, verifier.facts.text_config)
    gpu_policy = settings.capture.gpu_policy
    layer_ids = settings.capture.layer_ids(verifier.facts.num_hidden_layers)

    initial = None
    if settings.train.init is not None:
        initial = run.stage(
            warm_start, store, layer_ids, source=settings.train.init, verifier=verifier, draft=draft
        )

    run.begin("collect")
    # before the sources are read: what lands from here on is new to whoever compares
    trained_on = take_fingerprint(settings.data, settings.verifier)
    conversations = run.stage(collect, store, settings.data)
    if settings.data.regenerate:
        conversations = run.stage(
            regenerate, store, conversations, verifier, settings.regenerate, gpu_policy
        )
    samples = run.stage(
        tokenize_chats, store, conversations, verifier, settings.tokenize, settings.data.max_dropped
    )
    sides = run.stage(split, store, conversations, settings.split)
    vocab = run.stage(map_vocab, store, samples, sides, verifier, settings.vocab)
    run.show_data(conversations, samples, sides, vocab)
    check_prompts(sides, verifier, settings.evaluate)
    fitted = None
    if needs_fitting(settings.train):
        fitted = run.stage(
            fit_batch,
            store,
            layer_ids,
            vocab=vocab,
            verifier=verifier,
            draft=draft,
            settings=settings.train,
            gpu_policy=gpu_policy,
        )
    training = settle_batch(settings.train, fitted)
    check_budget(samples, training)

    run.begin("capture")
    max_dropped = settings.data.max_dropped
    plan = plan_capture(store, samples, verifier, settings.capture, max_dropped)
    if plan is not None:
        run.making([plan.path, capture_directory(plan.facts["capture_key"])])
        run_capture(
            store,
            plan,
            verifier,
            settings.capture,
            settings.verifier,
            samples=samples.rows,
            max_dropped=max_dropped,
        )
    states = run.stage(
        capture, store, samples, verifier, settings.capture, max_dropped, reused=plan is None
    )
    trained = run.stage(
        train,
        store,
        layer_ids,
        states=states,
        samples=samples,
        split=sides,
        vocab=vocab,
        verifier=verifier,
        draft=draft,
        settings=training,
        initial=initial,
        gpu_policy=gpu_policy,
    )
    before, after = (
        draft_recipe(verifier, vocab, layer_ids, draft, seed=settings.train.seed, weights=weights)
        for weights in (initial, trained)
    )
    prompts = Prompts(conversations, sides, verifier, settings.evaluate)
    evaluation = run.stage(
        evaluate, store, prompts, before=before, after=after, gpu_policy=gpu_policy
    )
    exported = run.stage(
        export,
        store,
        layer_ids,
        trained=trained,
        vocab=vocab,
        verifier=verifier,
        draft=draft,
        draft_tokens=settings.evaluate.draft_tokens,
        settings=settings.export,
    )
    decision = run.stage(
        promote,
        store,
        settings.promote.draft_of(settings.verifier),
        run=run.run_id,
        speculator=exported,
        evaluation=evaluation.parts[-1],
        recipe=after,
        prompts=prompts,
        settings=settings.promote,
        gpu_policy=gpu_policy,
    )
    _, at_start, at_end = (part.facts for part in evaluation.parts)
    return run.finish(
        speculator=artifacts.location(store, exported.parts[0]),
        acceptance={"before": at_start, "after": at_end},
        promotion={**decision.facts, "in service": decision.notes["in service"]},
        trained_on=trained_on,
    )


if __name__ == "__main__":
    from flows.cli import main

    sys.exit(main(["run", *sys.argv[1:]]))
