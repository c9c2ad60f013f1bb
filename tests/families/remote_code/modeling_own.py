"""Model of a type that transformers does not know: DeepSeek-V3 with one module for each expert."""

from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3ForCausalLM,
    DeepseekV3MLP,
    DeepseekV3MoE,
)

from .configuration_own import OwnMoeConfig  # noqa: TID252 - the form that transformers resolves


class OwnExperts(nn.ModuleList):
    def __init__(self, config: OwnMoeConfig) -> None:
        size = config.moe_intermediate_size
        super().__init__(
            DeepseekV3MLP(config, intermediate_size=size) for _ in range(config.n_routed_experts)
        )

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens [T, H], their experts and weights [T, k] -> [T, H]."""
        out = hidden.new_zeros(hidden.shape)
        for index, expert in enumerate(self):
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            mixed = expert(hidden[tokens]) * weights[tokens, places, None]
            out.index_add_(0, tokens, mixed.to(out.dtype))
        return out


class OwnMoeForCausalLM(DeepseekV3ForCausalLM):
    config_class = OwnMoeConfig

    def __init__(self, config: OwnMoeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if isinstance(layer.mlp, DeepseekV3MoE):
                layer.mlp.experts = OwnExperts(config)
