"""What draft a run trains: its settings, and the layer config that they and the verifier amount to."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.layer_config import check_readable, derived_layer, read_layer


class DraftPlan(BaseModel):
    """A draft that is checked against its verifier and ready to be built."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    settings: DraftSettings
    layer: dict[str, Any]
    """Values of the draft's LlamaConfig or Qwen3Config."""

    def identity(self) -> dict[str, Any]:
        """Return what determines the draft, as plain JSON types: not how it was asked for."""
        asked = {"config", "arch", "num_layers", "intermediate_size"}
        return {**self.settings.model_dump(mode="json", exclude=asked), "layer": self.layer}


def check_file(settings: DraftSettings) -> None:
    """Raise ValueError when draft.config names no JSON object: all that needs no verifier."""
    if settings.config is not None:
        check_readable(Path(settings.config).expanduser(), named_by="draft.config")


def plan_draft(settings: DraftSettings, text_config: dict[str, Any]) -> DraftPlan:
    """Return the draft of these settings for a verifier; ValueError when the two do not fit together."""
    if settings.config is None:
        return DraftPlan(settings=settings, layer=derived_layer(text_config, settings))
    path = Path(settings.config).expanduser()
    return DraftPlan(settings=settings, layer=read_layer(path, text_config, settings))
