"""The base of every stage's settings; free of Prefect and torch, so that flows and child processes share it."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

SPELLED_OUT = {"lr": "learning rate", "gpus": "GPUs", "ttt": "TTT", "fc": "FC"}
"""Parts of settings' names that a form writes in another way."""


def form_title(name: str, _field: Any) -> str:
    """Title of a setting in Prefect's form: ttt_step_decay -> TTT step decay."""
    title = " ".join(SPELLED_OUT.get(word, word) for word in name.split("_"))
    return title[:1].upper() + title[1:]


def show_choices(schema: dict[str, Any]) -> None:
    """Let a form show a Literal of one choice as a drop-down, like the others: pydantic calls it a constant."""
    for field in schema.get("properties", {}).values():
        for part in [field, *field.get("anyOf", [])]:
            if "const" in part:
                part["enum"] = [part.pop("const")]


class StageSettings(BaseModel):
    """Settings of one stage: frozen, closed, described by their attribute docstrings.

    What does not change the result (devices, batch sizes, cadences) is a *resource*: a setting that takes no part in
    the identity of what the stage makes.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        field_title_generator=form_title,
        json_schema_extra=show_choices,
    )

    resources: ClassVar[frozenset[str]] = frozenset()

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is meant, which would count as 1 and 0."""
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError("true and false fit only a setting that is switched on and off")
        return value

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the result, as plain JSON types."""
        return self.model_dump(mode="json", exclude=set(self.resources))
