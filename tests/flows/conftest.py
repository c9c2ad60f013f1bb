"""The command line, called in this process with settings that it has to refuse; what make up starts."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.run_log import OUR_LOGGERS
from tests.operated_site import Site, running, watched_values
from tests.storage.conftest import s3_endpoint, s3_environment, s3_store, store  # noqa: F401
from tests.tiny_models import make_llama
from tests.tiny_runs import Values, write_chats, write_settings

Refusal = Callable[..., str]


@pytest.fixture
def own_loggers() -> Iterator[None]:
    """The command line sets loggers for its process, which is ours here: put them back."""
    loggers = [logging.getLogger(name) for name in (*OUR_LOGGERS, "prefect")]
    before = [(one.level, one.propagate) for one in loggers]
    yield
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def refusal(tmp_path, prefect_api, plain, capsys, own_loggers) -> Refusal:
    """Run the command line on settings changed by groups; returns the one line of its error.

    All runs have one store, so that what is right in them is computed once.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    def run(*, status: int = 1, store: str | None = None, **groups: dict[str, Any]) -> str:  # noqa: F811
        values = plain | {"store": store or plain["store"]}
        for name, changes in groups.items():
            values[name] = values.get(name, {}) | changes
        file = write_settings(values, tmp_path / "settings.yaml")
        with temporary_settings(updates={PREFECT_API_URL: prefect_api}):
            code = main(["run", str(file)])
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("outrider: ")]
        assert code == status
        assert captured.out == ""
        assert len(errors) == 1
        assert "Traceback" not in captured.err
        for costly in ("states", "capture_plan", "checkpoints"):
            assert not (Path(plain["store"]) / costly).exists()
        return errors[0].removeprefix("outrider: ")

    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bad_input")
    return {
        "name": "bad-input",
        "store": str(directory / "store"),
        "verifier": {"model": str(make_llama(directory / "verifier"))},
        "data": {"sources": [str(write_chats(directory / "chats.jsonl", range(24)))]},
        "capture": {"rows_per_shard": 8},
        "vocab": {"draft_size": 128},
        "split": {"holdout_sources": ["unseen"]},
        "train": {"epochs": 1},
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """What make up starts, for all tests of a module."""
    with running(tmp_path_factory.mktemp("operated")) as made:
        yield made


@pytest.fixture
def values(tmp_path: Path, request: pytest.FixtureRequest) -> Values:
    """Settings of a tiny run, named after the test, with a directory in which files can land."""
    return watched_values(tmp_path, request.node.name)
