"""What of a checkpoint is quantized, and how: its config's own words, and what its weight files hold."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.eagle3.model_files import CONFIG_FILE, VerifierError
from tasks.eagle3.weight_files import TensorEntry

CONFIG_KEYS = ("quantization_config", "compression_config")

# Tensors that only a quantized module has beside, or in the place of, its weight: compressed-tensors
# (packed, scale), block-wise FP8 (scale_inv), GPTQ and AWQ (qweight), MXFP4 (blocks), bitsandbytes (absmax).
_QUANTIZED_PART = re.compile(
    r"(\.weight_packed|\.weight_scale|\.weight_scale_inv|\.qweight|_blocks|\.weight\.absmax)$"
)
_LAST_PART = re.compile(r"(_blocks|_scales|\.weight(\.[^.]+)?|\.(?![^.]*_(blocks|scales)$)[^.]+)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized."""

    scheme: str
    """Method, bits and groups, as the config states them."""
    modules: tuple[str, ...]
    """Modules that are stored quantized, "*" for any layer or expert number; sorted."""
    bytes: int
    """Bytes of these modules' tensors, their scales included."""


def read_quantization(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    *,
    place: str = CONFIG_FILE,
) -> Quantization | None:
    """Return how a checkpoint is quantized; None when neither config nor weight files say that it is.

    VerifierError names `place` when the config's words have no known form.
    """
    name, stated = next(
        ((k, c[k]) for c in (config, text) for k in CONFIG_KEYS if c.get(k)), ("", None)
    )
    modules = {_QUANTIZED_PART.sub("", key) for key in tensors if _QUANTIZED_PART.search(key)}
    if stated is None and not modules:
        return None
    inside = (entry for key, entry in tensors.items() if _LAST_PART.sub("", key) in modules)
    stored_bytes = sum(entry.stop - entry.start for entry in inside)
    patterns = tuple(sorted({_NUMBER.sub("*", module) for module in modules}))
    try:
        scheme = _scheme(stated or {})
    except (AttributeError, TypeError, ValueError) as error:
        raise VerifierError(
            f"{place}: {name} {json.dumps(stated)[:200]} is of no known form ({error}); correct it"
        ) from error
    return Quantization(scheme, patterns, stored_bytes)


def _scheme(stated: Mapping[str, Any]) -> str:
    weights = _group_weights(stated)
    method = [str(stated.get("quant_method", "unknown method"))]
    if stated.get("format"):
        method.append(str(stated["format"]))
    parts = [" ".join(method)]
    bits = _first(weights, "num_bits") or _first(stated, "bits", "w_bit")
    if bits:
        parts.append(f"{bits} bits" + (f" {weights['type']}" if weights.get("type") else ""))
    group = _first(weights, "group_size") or _first(stated, "group_size", "q_group_size")
    if group and group > 0:
        parts.append(f"groups of {group}")
    block = _first(weights, "block_structure") or _first(stated, "weight_block_size")
    if block:
        parts.append("blocks of " + " x ".join(str(extent) for extent in block))
    return ", ".join(parts)


def _group_weights(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what compressed-tensors says of the weights of its first group of modules."""
    groups = stated.get("config_groups") or {}
    first = next(iter(groups.values()), None) or {}
    return dict(first.get("weights") or {})


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)
