"""What determines an artifact, and the name that follows from it."""

from dataclasses import dataclass
from typing import Any

from storage.manifest import artifact_key


@dataclass(frozen=True)
class Identity:
    """Everything that determines an artifact.

    Args:
        stage: the stage's name, and the first directory of the path unless `directory` says
            otherwise. version: bumped when the stage's meaning changes. settings: the settings that
            change the result, as plain JSON types. inputs: name -> content digest of what it is
            made of. directory: where it lies in the store, when not at "<stage>/<key>".
    """

    stage: str
    version: int
    settings: dict[str, Any]
    inputs: dict[str, str]
    directory: str | None = None

    @property
    def key(self) -> str:
        """24 hexadecimal digits; ValueError when the settings are no plain JSON."""
        return artifact_key(
            stage=self.stage, version=self.version, settings=self.settings, inputs=self.inputs
        )

    @property
    def path(self) -> str:
        """The artifact's directory in the store."""
        return self.directory or f"{self.stage}/{self.key}"
