"""How captured states are stored: each codec turns [T, W] states into named tensors and back.

T = tokens, W = width (A * H or H). A codec's tensors are named after the states: "aux", and for
more parts "aux.<part>"; each has T rows, so that a range of rows can be decoded alone.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """One way of storing states."""

    bytes_per_value: float
    """Bytes stored for each value, parts per token left out; for estimates."""

    def encode(self, name: str, states: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """The tensors to store for the states `name`, [T, W]; contiguous, on the CPU."""

    def decode(self, name: str, parts: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """The states of any range of rows from the same range of every part, [rows, W]."""


class Bf16Codec:
    """Values rounded to bfloat16, the dtype verifiers compute in."""

    bytes_per_value = 2.0

    def encode(self, name: str, states: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """One tensor; no copy when it is bfloat16 already."""
        import torch  # noqa: PLC0415 - only who encodes needs it

        return {name: states.detach().to("cpu", torch.bfloat16).contiguous()}

    def decode(self, name: str, parts: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """The tensor as it is."""
        return parts[name]


CODECS: dict[str, Codec] = {"bf16": Bf16Codec()}


def codec_named(name: str) -> Codec:
    """The codec of that name; ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(
            f"the codec {name!r} is unknown; choose one of {', '.join(sorted(CODECS))}"
        )
    return CODECS[name]
