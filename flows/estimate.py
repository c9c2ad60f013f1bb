"""What a run will cost, before it: tokens, bytes, files, GPU hours, and what is there already.

The cheap stages are run for it (verifier facts, collect, tokenize), so the tokens are counted, not guessed; a run finds
what they made. Only answers that the verifier still has to write are taken at their longest.
"""

from typing import Any

from flows.settings import PipelineSettings
from storage.store import Store
from tasks.byte_sizes import show_bytes
from tasks.capture import bytes_per_token, capture_key
from tasks.collect import collect
from tasks.disk_space import DiskSpaceError, check_states_space
from tasks.eagle3.draft_plan import check_file, plan_draft
from tasks.load_verifier import Verifier, load_verifier, open_verifier
from tasks.map_vocab import check_draft_size
from tasks.regenerate import find_regenerated
from tasks.sample_index import SampleCount, count_samples
from tasks.stage import StageResult, call
from tasks.tokenize_chats import tokenize_chats
from tasks.verifier_sources import find_model

ASSUMED_FLOPS = 400e12
"""bf16 FLOP/s that one H100 or H200 gives a prefill: half of its matrix-product peak."""


def estimate(settings: PipelineSettings) -> dict[str, Any]:
    """Return the figures of a run as plain numbers; ValueError when its input is wrong."""
    store = Store(settings.store)
    store.check_writable()
    check_file(settings.draft)
    directory = str(find_model(settings.verifier))
    options = settings.verifier
    loaded = call(
        load_verifier,
        store,
        directory,
        trust_remote_code=options.trust_remote_code,
        full_digests=options.full_digests,
    )
    verifier = open_verifier(
        store, directory, loaded.parts[0], trust_remote_code=options.trust_remote_code
    )
    draft_size = check_draft_size(settings.vocab, verifier.facts.vocab_size)
    draft = plan_draft(settings.draft, verifier.facts.text_config)
    conversations = call(collect, store, settings.data)
    written: StageResult | None = conversations
    if settings.data.regenerate:
        written = find_regenerated(store, conversations, verifier, settings.regenerate)
    wanted, missing, quarantined = _counts(
        store, settings, conversations, written=written, verifier=verifier
    )
    per_token = bytes_per_token(verifier, settings.capture)
    missing_bytes = missing.tokens * per_token
    flops = 2 * verifier.facts.parameters * missing.tokens
    return {
        "at_most": written is None,
        "conversations": conversations.rows,
        "samples": wanted.samples,
        "tokens": wanted.tokens,
        "codec": settings.capture.codec,
        "bytes_per_token": per_token,
        "state_bytes": wanted.tokens * per_token,
        "captured_samples": wanted.samples - missing.samples - quarantined,
        "quarantined_samples": quarantined,
        "missing_samples": missing.samples,
        "missing_tokens": missing.tokens,
        "missing_bytes": missing_bytes,
        "shards": _shards(settings, missing_bytes, missing.samples),
        "free_bytes": store.free_bytes(),
        "shortage": _shortage(store, settings, missing, bytes_per_token=per_token),
        "verifier_parameters": verifier.facts.parameters,
        "capture_gpu_hours": flops / ASSUMED_FLOPS / 3600,
        "draft_size": draft_size,
        "draft_layer": draft.layer,
        "layers": list(settings.capture.layer_ids(verifier.facts.num_hidden_layers)),
        "hidden_size": verifier.facts.hidden_size,
    }


def _shortage(
    store: Store, settings: PipelineSettings, missing: SampleCount, *, bytes_per_token: int
) -> str | None:
    """What a run would be refused for, where the store has too little room."""
    try:
        check_states_space(
            store,
            samples=missing.samples,
            tokens=missing.tokens,
            bytes_per_token=bytes_per_token,
            codec=settings.capture.codec,
        )
    except DiskSpaceError as error:
        return str(error)
    return None


def _counts(
    store: Store,
    settings: PipelineSettings,
    conversations: StageResult,
    *,
    written: StageResult | None,
    verifier: Verifier,
) -> tuple[SampleCount, SampleCount, int]:
    """Count the samples: all, those to be captured, the quarantined; answers still to be written at their longest."""
    if written is None:
        longest = SampleCount(conversations.rows, conversations.rows * settings.tokenize.max_tokens)
        return longest, longest, 0
    samples = call(
        tokenize_chats, store, written, verifier, settings.tokenize, settings.data.max_dropped
    )
    return count_samples(
        store,
        samples.parts,
        capture_key(verifier, settings.capture),
        retry_quarantined=settings.capture.retry_quarantined,
    )


def render(figures: dict[str, Any]) -> str:
    """Return the figures as text, with the arithmetic."""
    layers = len(figures["layers"])
    free = figures["free_bytes"]
    lines = []
    if figures["at_most"]:
        lines.append(
            "AT MOST    the verifier has not written the answers yet (data.regenerate): every sample counts as "
            "tokenize.max_tokens, and the time to write them is not in it"
        )
    lines += [
        f"draft      {_layer(figures['draft_layer'])}, vocabulary of {figures['draft_size']:,} tokens",
        f"samples    {figures['samples']:,} of {figures['tokens']:,} tokens "
        f"from {figures['conversations']:,} conversations",
        f"states     {show_bytes(figures['state_bytes'])} = {figures['tokens']:,} tokens x ({layers} layers + 1) x "
        f"{_state(figures)}",
        f"captured   {figures['captured_samples']:,} samples are there, "
        f"{figures['quarantined_samples']:,} quarantined; {figures['missing_samples']:,} to do: "
        f"{figures['missing_tokens']:,} tokens, {show_bytes(figures['missing_bytes'])}, {figures['shards']} shards",
        f"store      {show_bytes(free)} free" if free is not None else "store      no limit known",
        f"capture    {figures['capture_gpu_hours']:.3f} GPU hours = 2 x {figures['verifier_parameters'] / 1e6:,.1f} M "
        f"parameters x {figures['missing_tokens']:,} tokens / {ASSUMED_FLOPS / 1e12:.0f} TFLOP/s",
    ]
    if figures["shortage"] is not None:
        lines.append(f"TOO LITTLE {figures['shortage']}")
    return "\n".join(lines)


def _layer(layer: dict[str, Any]) -> str:
    count = layer["num_hidden_layers"]
    return (
        f"{count} {layer['model_type']} layer{'s' if count > 1 else ''} of hidden size {layer['hidden_size']:,}, "
        f"{layer['num_attention_heads']} heads of {layer['head_dim']} ({layer['num_key_value_heads']} for keys), "
        f"intermediate size {layer['intermediate_size']:,}"
    )


def _state(figures: dict[str, Any]) -> str:
    if figures["codec"] == "fp8":
        return f"({figures['hidden_size']} values x 1 byte + a scale of 2)"
    return f"{figures['hidden_size']} values x 2 bytes"


def _shards(settings: PipelineSettings, size: int, samples: int) -> int:
    by_size = -(-size // (settings.capture.shard_megabytes * 1_000_000))
    return max(by_size, -(-samples // settings.capture.rows_per_shard))
