"""Load a verifier's language model by transformers, whatever it is nested in, packed as, or named after."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.eagle3.remote_code import is_native
from tasks.eagle3.verifier import VerifierError, VerifierFacts, read_facts
from tasks.engines.remote_code import admit, check_quantization

WEIGHTS_SHARE = 0.85
"""Of a GPU's free memory, when a model is spread over several; activations take the rest."""


def load_verifier_model(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a checkpoint's language model, in eval mode, from local files only.

    Of a composite checkpoint (Kimi-K2.5, vision models) the language model alone is loaded. Code that lies
    beside the weights runs only where transformers has none for the model type, and if it is trusted.
    `device` is "cpu", "cuda:0", ... or "auto" (spread over the GPUs there are). On a CPU compute in
    fp32: bf16 is some 20 times slower there.

    Raises VerifierError when the checkpoint lacks weights the model needs (transformers would
    leave them random), when it needs code that is not trusted, when no package here unpacks its weights, and when
    the GPUs it is spread over do not hold it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    if threads is not None:
        torch.set_num_threads(threads)
    facts = read_facts(directory)
    admit(directory, trusted=trust_remote_code)
    trusted = trust_remote_code and not is_native(facts.model_type)
    whole = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trusted)
    config = _text_config(whole, facts) if facts.config_path else whole
    # "kimi_k2" survives in a DeepseekV3Config; by that name transformers finds no rules to fuse experts.
    config.model_type = type(config).model_type or config.model_type
    check_quantization(directory, getattr(config, "quantization_config", None))
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": trusted,
        "output_loading_info": True,
    }
    if facts.config_path:
        options["key_mapping"] = text_key_mapping(facts)
    if getattr(config, "attn_logit_softcapping", None):
        # transformers' sdpa leaves the cap of the attention scores out, without a word.
        options["attn_implementation"] = "eager"
    if device == "auto":
        options |= spread_over(
            [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
        )
    elif device != "cpu":
        options["device_map"] = device
    loader: Any = AutoModelForCausalLM  # with output_loading_info it returns a pair
    model, info = loader.from_pretrained(directory, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        raise VerifierError(
            f"{directory}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint "
            f"(first: {missing[0]}); it would run with random ones"
        )
    if dtype == torch.float32:
        nn.Module.float(model)  # unpacked INT4 experts come in the dtype of their scales
    model.requires_grad_(requires_grad=False)
    if device == "auto":
        _check_on_gpus(model, directory)
    return model.eval()


def spread_over(free_bytes: Sequence[int]) -> dict[str, Any]:
    """Options of `from_pretrained` that put equal shares of the layers on GPUs with so many bytes free.

    A share of each GPU stays free for what computing takes; none of the model may go to RAM or disk.
    """
    room = {gpu: int(free * WEIGHTS_SHARE) for gpu, free in enumerate(free_bytes)}
    return {"device_map": "balanced", "max_memory": {**room, "cpu": 0}}


def _check_on_gpus(model: nn.Module, directory: Path) -> None:
    outside = {p.device.type for p in model.parameters()} - {"cuda"}
    if outside:
        raise VerifierError(
            f"{directory}: {torch.cuda.device_count()} GPUs do not hold the model (the rest would lie in "
            f"{', '.join(sorted(outside))}); raise capture.gpus_per_process"
        )


def text_key_mapping(facts: VerifierFacts) -> dict[str, str]:
    """Return patterns that take a composite checkpoint's keys to those of its language model."""
    base = facts.embed_key.removesuffix("embed_tokens.weight")
    mapping = {f"^{re.escape(base)}": "model."}
    if not facts.tied:
        mapping[f"^{re.escape(facts.head_key)}$"] = "lm_head.weight"
    return mapping


def _text_config(whole: Any, facts: VerifierFacts) -> Any:
    text = whole.get_text_config()
    if text.num_hidden_layers != facts.num_hidden_layers or text.vocab_size != facts.vocab_size:
        raise VerifierError(
            f"transformers takes {type(text).__name__} with {text.num_hidden_layers} layers for the "
            f"language model of {facts.model_type}, its config.json has one of "
            f"{facts.num_hidden_layers}; this composite model is not supported"
        )
    quantization = getattr(whole, "quantization_config", None)
    if quantization is not None and getattr(text, "quantization_config", None) is None:
        text.quantization_config = quantization
    return text
