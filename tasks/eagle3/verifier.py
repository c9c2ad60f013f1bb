"""Facts of a verifier, read from its config and its safetensors headers without torch or its code.

V = verifier vocabulary, H = verifier hidden size, L = decoder layers. The three tensors a draft needs
are the embedding [V, H], the final norm [H] and the head [V, H]; they are found by suffix, whatever
the prefix of the architecture is.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from tasks.eagle3.head_transform import HeadTransform, find_transform
from tasks.eagle3.model_files import LocalFiles, ModelFiles, VerifierError, open_files
from tasks.eagle3.verifier_config import (
    eos_token_ids,
    find_text_config,
    read_config,
    required_eps,
    required_number,
    with_defaults,
    without_incidentals,
)
from tasks.eagle3.weight_files import TensorEntry, WeightFile, content_digest, read_weight_files

__all__ = [
    "ModelDigests",
    "VerifierError",
    "VerifierFacts",
    "check_layer_ids",
    "check_layer_order",
    "default_layer_ids",
    "digest_model",
    "identity",
    "read_facts",
]

DIGEST_THREADS = 4

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")

# A tensor inside a decoder layer: DeepSeek-V3's multi-token-prediction layer has its own embedding.
_INSIDE_LAYER = re.compile(r"(^|\.)(layers|blocks|h)\.\d+\.")

# Tokenizer, template and generation: they decide ids, texts and stops.
_IDENTITY_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


class VerifierFacts(BaseModel):
    """What the other stages need to know about a verifier."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_type: str
    """The top-level config's model_type."""
    architectures: tuple[str, ...]
    """The top-level config's class names."""
    config_path: tuple[str, ...]
    """Keys from the top of config.json to the language model's config; empty when it is the top."""
    text_config: dict[str, Any]
    """The language model's config, as written in config.json."""
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    norm_eps: float
    transform: HeadTransform
    max_position_embeddings: int
    tied: bool
    """Whether the head is the embedding."""
    embed_key: str
    norm_key: str
    head_key: str
    """Equal to embed_key when tied."""
    files: dict[str, str]
    """File name of each of the three keys."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text: generation_config.json's, else the config's."""
    dtype: str | None
    """dtype the config states, such as "bfloat16"."""
    parameters: int
    """Values in all weight files; packed integers of a quantized checkpoint count as stored."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest text, by the config, or by a rope that is stretched further than it says."""
        rope = self.text_config.get("rope_parameters") or self.text_config.get("rope_scaling") or {}
        original = rope.get("original_max_position_embeddings") or 0
        return max(self.max_position_embeddings, int(original * (rope.get("factor") or 1)))


def read_facts(
    model: Path | ModelFiles, weights: Sequence[WeightFile] | None = None
) -> VerifierFacts:
    """Return the facts of a checkpoint in a local directory, or wherever its files lie.

    `weights` are the headers of its weight files, when they were read before.

    Raises VerifierError when files are missing, short or contradict each other, and when the model's
    head needs a transform that is not implemented here (a wrong head would train a draft on wrong
    targets in silence).
    """
    files = open_files(model)
    directory = files.directory
    config = with_defaults(read_config(files))
    config_path, text = find_text_config(config, directory)
    transform = find_transform(config, text)
    weights = read_weight_files(files) if weights is None else weights
    stored = {key: entry for file in weights for key, entry in file.tensors.items()}
    tensors = {key: entry for key, entry in stored.items() if not _INSIDE_LAYER.search(key)}
    embed_key = _one_match(tensors, "embed_tokens.weight", directory)
    norm_key = _find_norm(tensors, embed_key, directory)
    head_key = _find_head(tensors, embed_key, config, text, directory=directory)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    for key, shape in (
        (embed_key, (vocab, hidden)),
        (norm_key, (hidden,)),
        (head_key, (vocab, hidden)),
    ):
        _check_tensor(key, tensors[key], shape, directory=directory)
    return VerifierFacts(
        model_type=str(config.get("model_type", text.get("model_type", ""))),
        architectures=tuple(config.get("architectures") or text.get("architectures") or ()),
        config_path=config_path,
        text_config=text,
        hidden_size=hidden,
        num_hidden_layers=text["num_hidden_layers"],
        vocab_size=vocab,
        norm_eps=required_eps(text, directory),
        transform=transform,
        max_position_embeddings=required_number(text, "max_position_embeddings", directory),
        tied=head_key == embed_key,
        embed_key=embed_key,
        norm_key=norm_key,
        head_key=head_key,
        files={key: tensors[key].file for key in (embed_key, norm_key, head_key)},
        eos_token_ids=eos_token_ids(files, config, text),
        parameters=sum(math.prod(entry.shape) for entry in stored.values()),
        dtype=next(
            (c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k)), None
        ),
    )


class ModelDigests(NamedTuple):
    """What a verifier is, wherever its directory lies and whatever its name: sha256 digests."""

    whole: str
    """Of config, weights, tokenizer, template, generation config and code files."""
    computation: str
    """Of config, weights and code files: what it makes of token ids."""


def digest_model(
    directory: Path,
    *,
    full_digests: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ModelDigests:
    """Return the digests of a verifier's files.

    Of the weights they cover each file's name, size, header and content (of a large file a sample, unless
    `full_digests`; which of both is covered too). `progress` gets the bytes of each piece read, from several threads.
    Raises VerifierError when files are missing, short or do not belong together.
    """
    files = LocalFiles(directory)
    config = read_config(files)

    def digest(file: WeightFile) -> tuple[str, str]:
        return content_digest(directory, file, full=full_digests, progress=progress)

    found = read_weight_files(files)
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        # in the caller's context: the progress they report is logged as the caller's
        digests = [pool.submit(copy_context().run, digest, file) for file in found]
        weights = {
            file.name: [file.file_bytes, file.header_digest, *content.result()]
            for file, content in zip(found, digests, strict=True)
        }
    code = sorted(name for name in files.sizes if name.endswith(".py"))
    others = {
        name: hashlib.sha256(files.read(name)).hexdigest()
        for name in (*_IDENTITY_FILES, *code)
        if name in files.sizes
    }
    whole = {"config": without_incidentals(config), "weights": weights, "files": others}
    return ModelDigests(
        whole=_digest(whole),
        computation=_digest({**whole, "files": {name: others[name] for name in code}}),
    )


def identity(directory: Path, *, full_digests: bool = False) -> str:
    """Return the digest of all that a verifier is."""
    return digest_model(directory, full_digests=full_digests).whole


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def default_layer_ids(num_layers: int) -> list[int]:
    """Return [2, L // 2, L - 3], speculators' default layers; ValueError when L is below 7."""
    if num_layers < 7:
        raise ValueError(
            "the default layers [2, L // 2, L - 3] need 7 layers or more, the verifier has "
            f"{num_layers}; name the layers in capture.layers"
        )
    return [2, num_layers // 2, num_layers - 3]


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Raise ValueError unless the ids are ascending, each once, within [0, num_layers).

    Id i is the input of decoder layer i: transformers' hidden_states[i], vLLM's id i.
    """
    ids = list(layer_ids)
    check_layer_order(ids)
    if ids[-1] >= num_layers:
        raise ValueError(
            f"capture.layers {ids} must lie in [0, {num_layers}): the verifier has {num_layers} layers "
            "and id i is the input of layer i (the state after the last is always stored beside them)"
        )


def check_layer_order(layer_ids: Sequence[int]) -> None:
    """Raise ValueError unless the ids are ascending, each once, none negative: all that needs no verifier."""
    ids = list(layer_ids)
    if not ids:
        raise ValueError(
            "capture.layers is empty; name at least one layer or drop it for the default"
        )
    if ids != sorted(set(ids)):
        raise ValueError(
            f"capture.layers {ids} must be ascending and name each layer once: use {sorted(set(ids))}"
        )
    if ids[0] < 0:
        raise ValueError(
            f"capture.layers {ids} must not be negative: id i is the input of decoder layer i"
        )


def _one_match(tensors: Mapping[str, TensorEntry], suffix: str, directory: str) -> str:
    matches = [key for key in tensors if key == suffix or key.endswith("." + suffix)]
    if len(matches) != 1:
        found = (
            f"{len(matches)} tensors end in it: {', '.join(sorted(matches))}"
            if matches
            else "none does"
        )
        raise VerifierError(f"{directory}: exactly one tensor must end in {suffix}, but {found}")
    return matches[0]


def _find_norm(tensors: Mapping[str, TensorEntry], embed_key: str, directory: str) -> str:
    # The decoder's norm lies beside its embedding; towers and projectors have final norms too.
    beside = embed_key.removesuffix("embed_tokens.weight") + "norm.weight"
    norm_key = beside if beside in tensors else _one_match(tensors, "norm.weight", directory)
    bias = norm_key.removesuffix("weight") + "bias"
    if bias in tensors:
        raise VerifierError(
            f"{directory}: {bias} exists, so the final norm is a LayerNorm with a bias; "
            "only norms without one are supported"
        )
    return norm_key


def _find_head(
    tensors: Mapping[str, TensorEntry],
    embed_key: str,
    config: dict[str, Any],
    text: dict[str, Any],
    *,
    directory: str,
) -> str:
    """Return the key of the head's own tensor when there is one (so does transformers 5), else embed_key."""
    parts = sorted(key for key in tensors if re.search(r"(^|\.)lm_head\.", key))
    others = [key for key in parts if not key.endswith("lm_head.weight")]
    if others:
        raise VerifierError(
            f"{directory} stores its head with {', '.join(others)}: a quantized head or one with a bias "
            "is not supported; use a checkpoint whose lm_head is plain"
        )
    if parts:
        return _one_match(tensors, "lm_head.weight", directory)
    stated = [c["tie_word_embeddings"] for c in (config, text) if "tie_word_embeddings" in c]
    if stated and not any(stated):
        raise VerifierError(
            f"{directory} has no lm_head.weight although its config says tie_word_embeddings = "
            "false; the checkpoint is incomplete: fetch it again"
        )
    return embed_key


def _check_tensor(key: str, entry: TensorEntry, shape: tuple[int, ...], *, directory: str) -> None:
    if entry.shape != shape:
        raise VerifierError(
            f"{directory}/{entry.file}: {key} has shape {list(entry.shape)}, the config says "
            f"{list(shape)}; config and weights are of different models"
        )
    if entry.dtype not in PLAIN_DTYPES:
        raise VerifierError(
            f"{directory}/{entry.file}: {key} is stored as {entry.dtype}; only "
            f"{', '.join(PLAIN_DTYPES)} can be read (the layers may be quantized, this one may not)"
        )
