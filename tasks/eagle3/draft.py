"""The draft model: speculators' Eagle3DraftModel, built from tensors and saved for vLLM.

This is the one module behind which speculators lies: what other modules need of it is re-exported.

V = verifier vocabulary, D = draft vocabulary, H = hidden size, A = captured layers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.verifier_config import norm_eps

__all__ = [
    "LOSS_NAMES",
    "DraftSettings",
    "Eagle3DraftModel",
    "Eagle3SpeculatorConfig",
    "build_draft",
    "draft_config",
    "eager_loss",
    "load_speculator",
    "save_speculator",
    "trainable_parameters",
]

LOSS_NAMES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
"""Names of speculators' losses (speculators/losses/utils.py, 0.9.0)."""

_CONFIG_CLASSES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
}

# Multi-head latent attention: `head_dim` there is the rope part of a head, not a head.
_LATENT_ATTENTION_KEYS = ("kv_lora_rank", "qk_rope_head_dim")

# Legacy spellings that transformers strips and vLLM refuses (speculators 0.9.0, train/cli.py).
_LEGACY_ROPE_KEYS = ("type", "mrope_interleaved")


def draft_config(
    text_config: dict[str, Any],
    *,
    draft_vocab_size: int,
    layer_ids: Sequence[int],
    settings: DraftSettings,
    verifier_name_or_path: str,
    verifier_architectures: Sequence[str],
    draft_tokens: int,
) -> Eagle3SpeculatorConfig:
    """A fresh config of `settings.num_layers` layers with the verifier's widths, norms and rope.

    `text_config` is the verifier's resolved text config as a dict (the one with `hidden_size`).
    Raises ValueError when the widths contradict each other or the draft vocabulary is too large.
    """
    vocab_size = int(text_config["vocab_size"])
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size {draft_vocab_size} is not in 1..{vocab_size}, the verifier's "
            "vocabulary; lower it"
        )
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(f"layer ids {list(layer_ids)} are empty or repeat; name each layer once")
    widths = _attention_widths(text_config)
    config = _CONFIG_CLASSES[settings.arch](
        vocab_size=vocab_size,
        num_hidden_layers=settings.num_layers,
        intermediate_size=_intermediate_size(text_config, settings),
        hidden_act=text_config.get("hidden_act") or text_config["hidden_activation"],
        max_position_embeddings=int(text_config["max_position_embeddings"]),
        rms_norm_eps=norm_eps(text_config),
        initializer_range=float(text_config.get("initializer_range") or 0.02),
        rope_parameters=_rope_parameters(text_config, head_dim=widths["head_dim"]),
        attention_bias=False,
        # vLLM's llama draft reads its number of captured layers here (0.32, llama_eagle3.py)
        num_aux_hidden_states=len(layer_ids),
        tie_word_embeddings=False,
        bos_token_id=text_config.get("bos_token_id"),
        eos_token_id=text_config.get("eos_token_id"),
        **widths,
    )
    # Never left to a default: speculators' flex attention has no backward on a CPU.
    config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=draft_tokens)
    return Eagle3SpeculatorConfig(
        transformer_layer_config=config,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=verifier_name_or_path, architectures=list(verifier_architectures)
            ),
        ),
    )


def build_draft(
    config: Eagle3SpeculatorConfig,
    *,
    embed: Tensor,
    norm: Tensor,
    head: Tensor,
    t2d: Tensor,
    d2t: Tensor,
    seed: int,
    logit_scale: float = 1.0,
) -> Eagle3DraftModel:
    """A draft in fp32 around the verifier's own tensors, its trainable part drawn from `seed`.

    `embed` [V, H], `norm` [H] (the final norm), `head` [V, H], `t2d` [V] bool, `d2t` [D] offsets
    (target_id = draft_id + d2t[draft_id]). Both heads become `head[t2d] * logit_scale` and are frozen.
    The global random state is left as it was.
    """
    layer_config = config.transformer_layer_config
    _check_shapes(config, embed=embed, norm=norm, head=head)
    check_vocab_map(t2d, d2t, draft_vocab_size=config.draft_vocab_size)
    with torch.random.fork_rng(devices=[]):
        model: Eagle3DraftModel = Eagle3DraftModel(config).float()  # type: ignore[no-untyped-call]
    model.load_vocab_mappings(t2d.to(torch.bool), d2t.to(torch.long))
    draft_head = head[t2d.to(head.device, torch.bool)].to(torch.float32) * logit_scale  # [D, H]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.copy_(draft_head)
        model.verifier_lm_head.weight.copy_(draft_head)
        model.verifier_norm.weight.copy_(norm)
        _initialize(model, seed=seed, std=layer_config.initializer_range)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"{name} has non-finite values; check the verifier's tensors")
    return model


def trainable_parameters(model: Eagle3DraftModel) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter of everything that trains, sorted by name."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return dict(sorted(named.items()))


def save_speculator(
    model: Eagle3DraftModel, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write speculators' own checkpoint: config.json and model.safetensors, as vLLM loads it.

    The model stays as it is; the file holds `dtype` copies of its tensors (ids stay integers).
    """
    with torch.device("meta"):
        copy = Eagle3DraftModel(cast(Eagle3SpeculatorConfig, model.config))
    tensors = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
        for name, value in model.state_dict().items()
    }
    copy.load_state_dict(tensors, assign=True)
    copy.save_pretrained(directory)


def load_speculator(directory: Path, *, attention: str = "eager") -> Eagle3DraftModel:
    """Load a checkpoint by speculators itself, in the dtype of the file, frozen parts frozen.

    speculators reads head and norm from the verifier that the checkpoint names, so that directory
    or hub id must be readable.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = attention
    load = cast(Callable[..., Eagle3DraftModel], Eagle3DraftModel.from_pretrained)
    return load(directory, config=config)


def eager_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """speculators' eager loss of that name: (logits [1, N, D], targets [1, N, D]) -> [1, N]."""
    if name not in LOSS_NAMES:
        raise ValueError(f"loss {name!r} is unknown; choose one of {', '.join(LOSS_NAMES)}")
    function, _ = resolve_loss_config(name, "eager")[name]
    return function


def check_vocab_map(t2d: Tensor, d2t: Tensor, *, draft_vocab_size: int) -> None:
    """Raise ValueError unless `d2t` holds offsets that name each token of `t2d` once, in order."""
    targets = torch.arange(len(d2t)) + d2t.cpu()
    if len(d2t) != draft_vocab_size or not torch.equal(targets, t2d.cpu().nonzero()[:, 0]):
        raise ValueError(
            f"d2t ({len(d2t)} entries) and t2d ({int(t2d.sum())} tokens) do not describe one "
            f"draft vocabulary of {draft_vocab_size}: i + d2t[i] must run through the tokens of "
            "t2d in ascending order; rebuild the vocabulary map (d2t holds offsets, not ids)"
        )


def _check_shapes(
    config: Eagle3SpeculatorConfig, *, embed: Tensor, norm: Tensor, head: Tensor
) -> None:
    layer_config = config.transformer_layer_config
    vocab, hidden = layer_config.vocab_size, layer_config.hidden_size
    expected = {"embed": (vocab, hidden), "norm": (hidden,), "head": (vocab, hidden)}
    for (name, shape), tensor in zip(expected.items(), (embed, norm, head), strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"the verifier's {name} has shape {tuple(tensor.shape)}, its config says {shape}; "
                "the tensors and the config are of different verifiers"
            )


def _initialize(model: Eagle3DraftModel, *, seed: int, std: float) -> None:
    """Norms to one, matrices from N(0, std): by name, so that the order of modules is no input."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trainable_parameters(model).values():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))


def _intermediate_size(text_config: dict[str, Any], settings: DraftSettings) -> int:
    dense = settings.intermediate_size or text_config.get("intermediate_size")
    return int(dense or 3 * text_config["hidden_size"])


def _attention_widths(text_config: dict[str, Any]) -> dict[str, int]:
    hidden, heads = int(text_config["hidden_size"]), int(text_config["num_attention_heads"])
    kv_heads = int(text_config.get("num_key_value_heads") or heads)
    latent = any(text_config.get(key) for key in _LATENT_ATTENTION_KEYS)
    head_dim = None if latent else text_config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and the "
            "verifier's config names no head_dim; a draft needs one of the two"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "the verifier's config contradicts itself"
        )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(head_dim or hidden // heads),
    }


def _rope_parameters(text_config: dict[str, Any], *, head_dim: int) -> dict[str, Any]:
    """Flat rope parameters that turn whole heads; also from configs older than transformers 5."""
    rope = dict(text_config.get("rope_parameters") or text_config.get("rope_scaling") or {})
    if "full_attention" in rope:  # one set per layer type: the draft attends fully
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", float(text_config.get("rope_theta") or 10_000.0))
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    partial = float(rope.pop("partial_rotary_factor", None) or 1.0)
    if "mrope_section" in rope:
        rope["mrope_section"] = _full_head_sections(rope["mrope_section"], partial, head_dim)
    return {key: value for key, value in rope.items() if key not in _LEGACY_ROPE_KEYS}


def _full_head_sections(sections: Sequence[int], partial: float, head_dim: int) -> list[int]:
    """Sections of a partly rotated head scaled to the whole head, which is what drafts rotate.

    A server with multimodal positions needs the sections; for text all three positions are equal.
    """
    scaled = [round(size / partial) for size in sections]
    if 2 * sum(scaled) != head_dim:
        raise ValueError(
            f"mrope_section {list(sections)} with partial_rotary_factor {partial} covers "
            f"{2 * sum(scaled)} of head_dim {head_dim}; the verifier's config contradicts itself"
        )
    return scaled
