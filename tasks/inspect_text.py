"""What `inspect` found, as text: one line a fact."""

from typing import Any

LABEL_WIDTH = 16
MODULES_SHOWN = 8

NORMS = {
    "rms": "RMS norm times w",
    "rms_plus_one": "RMS norm times 1 + w",
    "layer": "LayerNorm times w",
}


def render_inspection(found: dict[str, Any]) -> str:
    """Return the text of what inspect_verifier returned."""
    path = ".".join(found["config_path"])
    lines = [
        ("model", found["directory"]),
        (
            "family",
            f"{found['model_type']} ({', '.join(found['architectures']) or 'no class named'})",
        ),
        ("language model", f"config.json: {path}" if path else "config.json, not nested"),
        (
            "sizes",
            f"{found['num_hidden_layers']} layers, hidden size {found['hidden_size']:,}, vocabulary "
            f"{found['vocab_size']:,}, context {found['context_length']:,} tokens",
        ),
        ("embedding", _tensor(found["tensors"]["embedding"])),
        ("final norm", _tensor(found["tensors"]["final_norm"])),
        ("head", "the embedding (tied)" if found["tied"] else _tensor(found["tensors"]["head"])),
        ("norm and logits", _transform(found["head_transform"])),
        *_quantization(found["quantization"]),
        *_layers(found),
        (
            "weights",
            f"{_size(found['weight_bytes'])} in {_files(found['weight_files'])}, "
            f"{found['parameters'] / 1e6:,.1f} M stored values",
        ),
        ("ends a text", _ends(found["eos_token_ids"])),
        ("chat template", "there" if found["chat_template"] else "NONE: chats cannot be tokenized"),
        ("engine", f"{found['recommended']['engine']} on {found['recommended']['where']}"),
        ("", found["recommended"]["reason"]),
    ]
    return "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in lines)


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['key']}  {tensor['dtype']} {tensor['shape']}  in {tensor['file']}"


def _transform(transform: dict[str, Any]) -> str:
    steps = [NORMS[transform["norm"]]]
    if transform["logit_scale"] != 1.0:
        steps.append(f"logits times {transform['logit_scale']:g}")
    if transform["logit_softcap"] is not None:
        steps.append(f"logits capped at {transform['logit_softcap']:g} by tanh")
    return "; ".join(steps)


def _quantization(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return [("quantization", "none")]
    modules = found["modules"]
    lines = [("quantization", found["scheme"])]
    if modules:
        lines.append(("", f"{_size(found['bytes'])} of the weights, in the modules"))
        lines += [("", f"  {module}") for module in modules[:MODULES_SHOWN]]
    if len(modules) > MODULES_SHOWN:
        lines.append(("", f"  and {len(modules) - MODULES_SHOWN} more kinds"))
    return lines


def _layers(found: dict[str, Any]) -> list[tuple[str, str]]:
    ids, layers = found["default_layers"], found["num_hidden_layers"]
    if not ids:
        return [("captured", f"{layers} layers have no default: name ids in capture.layers")]
    return [
        (
            "captured",
            f"layers {ids} by default: the inputs of decoder layers {', '.join(map(str, ids))},",
        ),
        ("", f"and the last state: the output of layer {layers - 1}, before the final norm"),
        (
            "a token takes",
            f"{found['bytes_per_token']:,} bytes = ({len(ids)} layers + 1) x {found['hidden_size']:,} "
            "values x 2 bytes (bf16)",
        ),
        ("", f"{found['bytes_per_token_fp8']:,} bytes with capture.codec fp8"),
    ]


def _ends(ids: list[int]) -> str:
    return "token " + " or ".join(map(str, ids)) if ids else "NOTHING: no eos_token_id is named"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
