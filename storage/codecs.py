"""How captured states are stored: each codec turns [T, W] states into named tensors and back.

T = tokens, H = verifier hidden size, W = width (A * H or H): A captured layers side by side, or the
last state alone. A codec's tensors are named after the states: "aux", and for more parts
"aux.<part>"; each has T rows, so that a range of rows can be decoded alone.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """One way of storing states."""

    def state_bytes(self, hidden_size: int) -> int:
        """Bytes that one state of one token takes: H values and what belongs to them."""

    def widths(self, name: str, width: int, hidden_size: int) -> dict[str, int]:
        """Columns of every tensor that the states `name`, [T, W], are stored as."""

    def encode(
        self, name: str, states: "torch.Tensor", *, hidden_size: int
    ) -> dict[str, "torch.Tensor"]:
        """The tensors to store for the states `name`, [T, W]; contiguous, on the CPU."""

    def decode(self, name: str, parts: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """The states of any range of rows from the same range of every part: [rows, W] bfloat16."""


class Bf16Codec:
    """Values rounded to bfloat16, the dtype verifiers compute in."""

    def state_bytes(self, hidden_size: int) -> int:
        """2 bytes a value."""
        return 2 * hidden_size

    def widths(self, name: str, width: int, hidden_size: int) -> dict[str, int]:
        """One tensor."""
        del hidden_size
        return {name: width}

    def encode(
        self, name: str, states: "torch.Tensor", *, hidden_size: int
    ) -> dict[str, "torch.Tensor"]:
        """One tensor; no copy when it is bfloat16 already."""
        import torch  # noqa: PLC0415 - only who encodes needs it

        del hidden_size
        return {name: states.detach().to("cpu", torch.bfloat16).contiguous()}

    def decode(self, name: str, parts: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """The tensor as it is."""
        return parts[name]


class Fp8Codec:
    """Values in float8 e4m3 (3 bits of mantissa), with a scale for each token and layer.

    A scale is the smallest power of two that brings its layer's largest value into e4m3's range:
    scaling then rounds nothing, bfloat16 holds a scale exactly, and so it does every decoded value.
    A value is off by 2^-4 of itself at most, or where that is more, by 2^-17 of its layer's largest.
    """

    def state_bytes(self, hidden_size: int) -> int:
        """1 byte a value, and 2 for the scale."""
        return hidden_size + 2

    def widths(self, name: str, width: int, hidden_size: int) -> dict[str, int]:
        """The values, and a scale for each layer."""
        return {name: width, f"{name}.scale": width // hidden_size}

    def encode(
        self, name: str, states: "torch.Tensor", *, hidden_size: int
    ) -> dict[str, "torch.Tensor"]:
        """Values [T, W] and scales [T, A]; a layer with a value that is not finite becomes NaN."""
        import torch  # noqa: PLC0415 - see above

        shape = len(states), states.shape[1] // hidden_size, hidden_size
        layers = states.detach().cpu().reshape(shape)  # [T, A, H]
        largest = torch.linalg.vector_norm(layers, ord=torch.inf, dim=2).float()  # [T, A]
        mantissa, exponent = torch.frexp(largest)  # mantissa * 2^exponent, 0.5 <= mantissa < 1
        top_mantissa, top_exponent = 0.875, 9  # 448, e4m3's largest value
        power = exponent - top_exponent + (mantissa > top_mantissa)
        smallest_power = -124  # times 2^-9, e4m3's smallest value, it is bfloat16's smallest
        scale = torch.ldexp(torch.ones_like(largest), power.clamp_min(smallest_power))  # [T, A]
        scale = scale.where(largest.isfinite(), torch.nan)  # casts to e4m3 may make inf a number
        values = (layers / scale[..., None].to(layers.dtype)).to(torch.float8_e4m3fn)
        return {name: values.flatten(1), f"{name}.scale": scale.bfloat16()}

    def decode(self, name: str, parts: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Each value times its layer's scale.

        The bits of an e4m3 value, moved to those places of a bfloat16, are that value times 2^-120 (the exponents'
        biases are 7 and 127), subnormal ones too. On a CPU this is 8 times faster than by torch's own cast (2.14).
        """
        import torch  # noqa: PLC0415 - see above

        scale = parts[f"{name}.scale"]  # [T, A]
        sign_exponent_mantissa = -0x8000 + 0x07F0
        moved = parts[name].view(torch.int8).to(torch.int16).bitwise_left_shift_(4)  # [T, W]
        values = moved.bitwise_and_(sign_exponent_mantissa).view(torch.bfloat16).mul_(2.0**120)
        layers = values.view(*scale.shape, values.shape[1] // scale.shape[1])  # [T, A, H]
        return layers.mul_(scale[..., None]).flatten(1)


CODECS: dict[str, Codec] = {"bf16": Bf16Codec(), "fp8": Fp8Codec()}


def codec_named(name: str) -> Codec:
    """The codec of that name; ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(
            f"the codec {name!r} is unknown; choose one of {', '.join(sorted(CODECS))}"
        )
    return CODECS[name]


def as_stored(codec: str, states: "torch.Tensor") -> "torch.Tensor":
    """What becomes of states [T, H] in a file: encoded and decoded again."""
    chosen = codec_named(codec)
    return chosen.decode("last", chosen.encode("last", states, hidden_size=states.shape[1]))
