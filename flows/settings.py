"""PipelineSettings: one file of settings for a whole run, assembled from what each stage declares."""

import difflib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from storage.store import Store
from tasks.capture_settings import CaptureSettings
from tasks.collect import DataSettings
from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.training_settings import TrainSettings
from tasks.evaluate import EvaluateSettings
from tasks.export import ExportSettings
from tasks.map_vocab import VocabSettings
from tasks.promote import PromoteSettings
from tasks.regenerate import RegenerateSettings
from tasks.split import SplitSettings
from tasks.tokenize_chats import TokenizeSettings
from tasks.verifier_sources import VerifierSettings


class SettingsError(ValueError):
    """The settings were refused; the message names each key, its value and the way out."""


class PipelineSettings(BaseModel):
    """Everything that one run of the pipeline is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", title="Name")
    """Name of the run's settings, shown in Prefect and in reports."""
    store: str = Field(min_length=1, title="Store")
    """Where artifacts lie: a directory or an fsspec URL (s3://, gs://, az://)."""
    verifier: VerifierSettings = Field(title="Verifier")
    """The model whose drafts are trained."""
    data: DataSettings = Field(title="Data")
    """Where the conversations come from."""
    regenerate: RegenerateSettings = Field(default=RegenerateSettings(), title="Regenerate")
    """How the verifier writes answers, with data.regenerate."""
    tokenize: TokenizeSettings = Field(default=TokenizeSettings(), title="Tokenize")
    """How conversations become token ids."""
    capture: CaptureSettings = Field(default=CaptureSettings(), title="Capture")
    """How the verifier's hidden states are captured."""
    vocab: VocabSettings = Field(default=VocabSettings(), title="Vocabulary")
    """The draft's vocabulary."""
    split: SplitSettings = Field(default=SplitSettings(), title="Split")
    """Which conversations are kept from training."""
    draft: DraftSettings = Field(default=DraftSettings(), title="Draft")
    """The draft model."""
    train: TrainSettings = Field(default=TrainSettings(), title="Train")
    """How the draft is trained."""
    evaluate: EvaluateSettings = Field(default=EvaluateSettings(), title="Evaluate")
    """How the draft is judged."""
    export: ExportSettings = Field(default=ExportSettings(), title="Export")
    """The speculators checkpoint."""
    promote: PromoteSettings = Field(default=PromoteSettings(), title="Promote")
    """When a draft is put in service."""

    @property
    def devices(self) -> dict[str, str]:
        """Key -> device of the stages that compute on this machine."""
        groups = {"train": self.train.device, "evaluate": self.evaluate.device}
        if self.data.regenerate:
            groups["regenerate"] = self.regenerate.device
        if self.capture.nodes == 1:
            groups["capture"] = self.capture.device
        return {f"{group}.device": device for group, device in groups.items()}

    @field_validator("store")
    @classmethod
    def _seen_by_child_processes(cls, url: str) -> str:
        if url.startswith("memory:"):
            raise ValueError(
                "a store in memory ends with its process, and stages run in processes of their own; "
                "name a directory or a bucket"
            )
        Store(url)  # refuses what is no URL of a known kind
        return url

    @model_validator(mode="after")
    def _seen_by_other_machines(self) -> Self:
        if (
            self.capture.nodes > 1
            and self.store != Store(self.store).url
            and "://" not in self.store
        ):
            raise ValueError(
                f"store {self.store} is a relative path, and capture.nodes is {self.capture.nodes}: name a bucket, or "
                "the absolute path of a directory that all machines share"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _empty_groups(cls, values: Any) -> Any:
        """A group that a file names without anything in it has its defaults."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


def load_settings(path: Path, overrides: list[str] | None = None) -> PipelineSettings:
    """Read a settings file; `overrides` are `dotted.key=value` with YAML values.

    Raises SettingsError for a missing or broken file, an unknown key or a value that does not fit.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"settings file {path} is no YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {path} holds no mapping of keys to values")
    for override in overrides or []:
        _override(values, override)
    return parse_settings(values)


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings name no key twice: the second would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; ConstructorError for a key that is there already."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def parse_settings(values: dict[str, Any]) -> PipelineSettings:
    """Validate settings; SettingsError names every unknown key with the nearest known one."""
    try:
        return PipelineSettings.model_validate(values)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise SettingsError("; ".join(problems)) from error


def describe_settings() -> str:
    """Return the reference of all settings as Markdown, from the models' own docstrings."""
    lines = [
        "# Settings",
        "",
        "Generated by `make docs`; every key, its default and what it does.",
        "",
    ]
    for name, field in PipelineSettings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            lines += [f"## `{name}`", "", (model.__doc__ or "").strip(), ""]
            lines += ["| key | type | default | |", "|---|---|---|---|"]
            lines += [_row(f"{name}.{key}", sub) for key, sub in model.model_fields.items()] + [""]
        else:
            required = " Required." if field.is_required() else ""
            lines += [f"## `{name}`", "", f"{field.description}{required}", ""]
    return "\n".join(lines)


def _row(key: str, field: Any) -> str:
    default = "required" if field.is_required() else f"`{field.default!r}`"
    kind = _kind(field.annotation)
    about = " ".join((field.description or "").split())
    return f"| `{key}` | {kind.replace('|', 'or')} | {default} | {about} |"


def _kind(annotation: Any) -> str:
    """Name a type as a user writes it: the choices of a Literal, the parts of a union."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    return str(getattr(annotation, "__name__", annotation))


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {override!r}: write it as key=value, for example train.lr=1e-4")
    *parents, last = key.split(".")
    target: Any = values
    for parent in parents:
        if target.get(parent) is None:  # missing, or left empty in the file
            target[parent] = {}
        target = target[parent]
        if not isinstance(target, dict):
            raise SettingsError(f"--set {override!r}: {parent} is a value, not a group of settings")
    target[last] = _yaml_value(text, override)


def _yaml_value(text: str, override: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(
            f"--set {override!r}: {text!r} is no YAML value: {' '.join(str(error).split())}"
        ) from error
    if isinstance(value, str):
        try:  # YAML 1.1 takes 1e-4 for a string
            return float(value)
        except ValueError:
            return value
    return value


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        name = str(problem["loc"][-1])
        nearest = _in_a_group(name) if len(problem["loc"]) == 1 else None
        if nearest is not None:
            return f"{where}: there is no such setting; did you mean {nearest}?"
        nearest = _nearest(name, known)
        hint = f"; did you mean {nearest}?"
        if nearest != _initials(name) and not difflib.get_close_matches(
            name, [nearest], cutoff=0.5
        ):
            hint += f" There are: {', '.join(known)}"
        return f"{where}: there is no such setting{hint}"
    if problem["type"] == "missing":
        return f"{where}: this setting is required"
    if problem["type"] in {"tuple_type", "list_type"}:
        return f"{where}: write a list, for example [a, b] (given: {problem['input']!r})"
    if problem["type"] in {"model_type", "dict_type"}:
        keys = ", ".join(_known_keys(problem["loc"]))
        return f"{where}: write a group of settings, {{key: value}}, of {keys} (given: {problem['input']!r})"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (given: {problem['input']!r})"


def _in_a_group(name: str) -> str | None:
    """Return the one dotted key that ends in this name, if there is one."""
    found = [
        f"{group}.{name}"
        for group, field in PipelineSettings.model_fields.items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, BaseModel)
        and name in field.annotation.model_fields
    ]
    return found[0] if len(found) == 1 else None


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _nearest(name: str, known: list[str]) -> str:
    """Return the known name that is most like this one; learning_rate is lr."""
    if _initials(name) in known:
        return _initials(name)
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]


def _known_keys(parents: tuple[Any, ...]) -> list[str]:
    model: Any = PipelineSettings
    for parent in parents:
        model = model.model_fields[parent].annotation
    return list(model.model_fields)
