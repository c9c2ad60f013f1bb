"""Config of a model type that transformers does not know; a test lays it beside the weights."""

from transformers import DeepseekV3Config


class OwnMoeConfig(DeepseekV3Config):
    model_type = "own_moe"
