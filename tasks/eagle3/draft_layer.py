"""One decoder layer of the draft, on the rows of a TTT step.

N = query rows, M = rows with step-0 keys, H = hidden size, C = head width, Q / V = query / key
heads, O = (Q + 2 * V) * C, I = MLP width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.attention import ttt_attention
from tasks.eagle3.folded import fold
from tasks.eagle3.row_ops import normalize, rotate, select_rows, silu_gate
from tasks.eagle3.step_plan import Sequences, TileGroup


@dataclass(frozen=True)
class Rotation:
    """Rotary tables of the rows that make queries and of those that make keys, [., C] each."""

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


@dataclass
class LayerMemory:
    """Keys and values of the TTT steps so far."""

    keys: Tensor | None = None  # [M, V, C], of step 0
    values: Tensor | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [N, V, C] twice, later steps

    def keep(self, index: Tensor) -> None:
        """Follow the rows that the next step still needs."""
        self.own = [(select_rows(k, index), select_rows(v, index)) for k, v in self.own]


class DraftLayer:
    """A layer's weights as its products read them: gains folded in, cast once for all steps."""

    def __init__(self, layer: Any, *, first: bool, dtype: torch.dtype) -> None:
        """Read a transformers decoder layer; `first` = speculators' one with two inputs."""
        attention, mlp = layer.self_attn, layer.mlp
        _check_plain(attention, mlp)
        self.dtype = dtype
        self.head_width = int(attention.head_dim)
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.scale = float(attention.scaling)
        projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        self.query_width = len(projections[0])
        self.query_heads = self.query_width // self.head_width
        self.kv_heads = len(projections[1]) // self.head_width
        # [O, 2 * H] in the first layer, else [O, H]. The half of the embedding is frozen: with the
        # gain in the matrix its normed rows need no gradient.
        gains = [layer.input_layernorm.weight]
        gains += [layer.hidden_norm.weight] if first else []
        *embed, self.hidden = fold(projections, gains, dtype=dtype)
        self.embed = embed[0] if embed else None
        normed_residual = first and layer.norm_before_residual
        self.residual_gain = layer.hidden_norm.weight if normed_residual else None
        self.query_gain = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.key_gain = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        (self.out,) = fold([attention.o_proj.weight], [None], dtype=dtype)
        (self.gate_up,) = fold(  # [2 * I, H]
            [mlp.gate_proj.weight, mlp.up_proj.weight],
            [layer.post_attention_layernorm.weight],
            dtype=dtype,
        )
        (self.down,) = fold([mlp.down_proj.weight], [None], dtype=dtype)
        self.gate = _gate_function(mlp.act_fn)

    def project_embeds(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding's part of queries [., Q * C] and of keys and values [., 2 * V * C]."""
        if self.embed is None:
            raise ValueError("only the first layer reads embeddings")
        return (
            self.embed.linear(queries, outputs=slice(self.query_width)),
            self.embed.linear(keys, outputs=slice(self.query_width, None)),
        )

    def __call__(
        self,
        hidden: Tensor,
        *,
        queries: Tensor | None,
        embeds: tuple[Tensor, Tensor] | None,
        rotation: Rotation,
        memory: LayerMemory,
        visible: tuple[TileGroup, ...] | Sequences,
    ) -> Tensor:
        """The layer's output at the query rows, [N, H].

        `hidden` holds the rows that make keys, `queries` the index of the query rows among them
        (none = all), `embeds` what is added to queries and to keys and values.
        """
        wide = normalize(hidden, eps=self.eps, dtype=hidden.dtype)
        normed = wide.to(self.dtype)
        query, key, value = self._project(normed, queries, embeds)
        self._remember(memory, key, value, rotation)
        query = rotate(
            self._head_norm(query, self.query_gain), cos=rotation.query_cos, sin=rotation.query_sin
        )
        mixed = self._attend(query, memory, visible)
        residual = hidden if self.residual_gain is None else wide * self.residual_gain
        if queries is not None:
            residual = select_rows(residual, queries)
        hidden = residual + self.out.linear(mixed.to(self.dtype))
        normed = normalize(hidden, eps=self.eps, dtype=self.dtype)
        return hidden + self.down.linear(self.gate(self.gate_up.linear(normed)))

    def _project(
        self, normed: Tensor, queries: Tensor | None, embeds: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[N, Q, C], [M, V, C], [M, V, C]."""
        if queries is None:
            both = self.hidden.linear(normed)
            query, key_value = both.tensor_split([self.query_width], dim=1)
        else:
            query = self.hidden.linear(
                select_rows(normed, queries), outputs=slice(self.query_width)
            )
            key_value = self.hidden.linear(normed, outputs=slice(self.query_width, None))
        if embeds is not None:
            query, key_value = query + embeds[0], key_value + embeds[1]
        key, value = key_value.reshape(len(normed), 2, self.kv_heads, self.head_width).unbind(1)
        return query.reshape(len(query), self.query_heads, self.head_width), key, value

    def _remember(
        self, memory: LayerMemory, key: Tensor, value: Tensor, rotation: Rotation
    ) -> None:
        key = rotate(
            self._head_norm(key, self.key_gain), cos=rotation.key_cos, sin=rotation.key_sin
        )
        if memory.keys is None:
            memory.keys, memory.values = key, value
        else:
            memory.own.append((key, value))

    def _attend(
        self, query: Tensor, memory: LayerMemory, visible: tuple[TileGroup, ...] | Sequences
    ) -> Tensor:
        keys, values = memory.keys, memory.values
        if keys is None or values is None:
            raise ValueError("the layer has no step-0 keys; run step 0 first")
        if memory.own:
            own_keys, own_values = (torch.stack(own) for own in zip(*memory.own, strict=True))
        else:
            own_keys, own_values = (rows.new_empty((0, *rows.shape)) for rows in (keys, values))
        return ttt_attention(
            query,
            keys=keys,
            values=values,
            own_keys=own_keys,
            own_values=own_values,
            visible=visible,
            scale=self.scale,
        )

    def _head_norm(self, heads: Tensor, gain: Tensor | None) -> Tensor:
        """Qwen3 norms each head of queries and keys; Llama does not."""
        if gain is None:
            return heads
        return normalize(heads, eps=self.eps, dtype=gain.dtype) * gain


def _gate_function(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, torch.nn.SiLU) or type(activation).__name__ == "SiLUActivation":
        return silu_gate

    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return gate


def _check_plain(attention: Any, mlp: Any) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name in names:
        module = getattr(attention, name, None) or getattr(mlp, name)
        if module.bias is not None:
            raise ValueError(f"{name} has a bias, which the training step does not apply")
    if attention.attention_dropout:
        raise ValueError(
            f"attention_dropout {attention.attention_dropout} is not applied by the training "
            "step; set it to 0"
        )
