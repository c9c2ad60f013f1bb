"""Settings of the draft model. Importable without torch: the flow's process reads only this."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from tasks.stage_settings import form_title


class DraftSettings(BaseModel):
    """Shape of the draft; everything else about it follows from the verifier."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        field_title_generator=form_title,
    )

    config: str | None = None
    """A JSON file with the config of the draft's layers (llama or qwen3), instead of `arch`, `num_layers` and
    `intermediate_size`; empty = derived from the verifier's."""

    arch: Literal["llama", "qwen3"] = "llama"
    """Decoder layer of the draft, of those that vLLM serves. `qwen3` norms queries and keys."""

    num_layers: Literal[1, 2] = 1
    """Decoder layers. EAGLE-3 uses one; a second costs time at every drafted token."""

    intermediate_size: PositiveInt | None = None
    """Width of the MLP; empty = the verifier's dense width, or 3 x hidden size if none."""

    norm_before_fc: bool = False
    """Norm the concatenated captured states before the projection: for verifiers whose
    activations are large."""

    fc_norm: bool = False
    """Norm each captured layer's states on its own before the projection; excludes
    `norm_before_fc`."""

    norm_output: bool = False
    """Hand the normed state, not the raw one, to the next test-time-training step."""

    norm_before_residual: bool = False
    """Let the residual branch start from the normed state."""

    @model_validator(mode="after")
    def _one_description(self) -> "DraftSettings":
        for name in ("arch", "num_layers", "intermediate_size"):
            value = getattr(self, name)
            if self.config is not None and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"draft.{name} {value} is set beside draft.config {self.config}, which describes the "
                    "layers alone; remove one of the two"
                )
        return self

    @model_validator(mode="after")
    def _one_input_norm(self) -> "DraftSettings":
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both set, but the projection has one input norm; "
                "turn one of them off"
            )
        return self
