"""A speculators checkpoint that a training starts from: whether it is this run's kind of draft, and its tensors.

What depends on the draft vocabulary is frozen and made anew, so that may differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.eagle3.draft_plan import DraftPlan
from tasks.eagle3.layer_config import NORM_OPTIONS, read_layer
from tasks.eagle3.model_files import CONFIG_FILE, LocalFiles, read_json_object
from tasks.eagle3.verifier import default_layer_ids
from tasks.eagle3.weight_files import read_weight_files

SETTING = "train.init"

_SHAPING = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rope_parameters",
)  # fmt: skip

_FROZEN = frozenset(
    {
        "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight",
        "t2d", "d2t",
    }
)  # fmt: skip


def check_speculator(
    directory: Path, *, draft: DraftPlan, text_config: dict[str, Any], layer_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the checkpoint's config; ValueError unless its tensors mean in this run's draft what they meant there.

    `text_config` is the verifier's; `layer_ids` are the layers whose states this run captures.
    """
    config = read_json_object(LocalFiles(directory), CONFIG_FILE)
    place = f"{SETTING} {directory}"
    _check_kind(config, place)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = default_layer_ids(text_config["num_hidden_layers"])
    if list(ids) != list(layer_ids):
        raise ValueError(
            f"{place}: it reads the verifier's layers {ids}, this run captures {list(layer_ids)}; "
            f"set capture.layers to {ids}"
        )
    for option in NORM_OPTIONS:
        theirs, ours = bool(config.get(option)), getattr(draft.settings, option)
        if theirs != ours:
            raise ValueError(
                f"{place}: its {option} is {theirs}, the setting draft.{option} is {ours}; "
                f"set draft.{option} to {str(theirs).lower()}"
            )
    layer = read_layer(directory / CONFIG_FILE, text_config, draft.settings, named_by=SETTING)
    for field in _SHAPING:
        if layer[field] != draft.layer[field]:
            raise ValueError(
                f"{place}: its layers have {field} {layer[field]}, this run's draft {draft.layer[field]}; "
                f"set draft.config to {directory / CONFIG_FILE}"
            )
    return config


def _check_kind(config: dict[str, Any], place: str) -> None:
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(
            f"{place}: its speculators_model_type is {kind!r}, not 'eagle3'; name an EAGLE-3 checkpoint of speculators"
        )
    if config.get("embed_requires_grad"):
        raise ValueError(
            f"{place}: its embedding was trained too (embed_requires_grad), but here it is the verifier's; "
            "name a checkpoint that was trained without"
        )


def read_trainable(directory: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors named in `shapes` as they are stored; ValueError when one is missing, misshapen or not finite.

    Tensors that a draft of these shapes has no place for are refused too.
    """
    place = f"{SETTING} {directory}"
    entries = {
        key: e
        for file in read_weight_files(LocalFiles(directory))
        for key, e in file.tensors.items()
    }
    unknown = sorted(entries.keys() - shapes.keys() - _FROZEN)
    missing = sorted(shapes.keys() - entries.keys())
    if unknown or missing:
        raise ValueError(
            f"{place}: this run's draft has {missing[:3] or 'nothing'} that it lacks, and it has "
            f"{unknown[:3] or 'nothing'} that the draft lacks; it is another kind of draft"
        )
    found = {}
    for name, shape in shapes.items():
        if entries[name].shape != tuple(shape):
            raise ValueError(
                f"{place}: its {name} has the shape {entries[name].shape}, this run's draft {tuple(shape)}; "
                f"set draft.config to {directory / CONFIG_FILE} and capture.layers to its layers"
            )
        with safe_open(directory / entries[name].file, framework="pt") as file:
            found[name] = file.get_tensor(name)
        if not torch.isfinite(found[name]).all():
            raise ValueError(f"{place}: its {name} has non-finite values; name another checkpoint")
    return found
