"""The Prefect server of a run: the one that is configured has to answer, and a killed run's leaves nothing for good."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server import SCRATCH_PREFIX, api_server


def test_a_configured_server_that_does_not_answer_is_named_with_both_ways_out():
    nowhere = "http://127.0.0.1:9/api"

    with (
        temporary_settings(updates={PREFECT_API_URL: nowhere}),
        pytest.raises(
            RuntimeError, match=rf"{nowhere} does not answer .* or unset PREFECT_API_URL"
        ),
        api_server(),
    ):
        pass


def test_what_killed_runs_left_is_removed_and_what_others_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, used = (tmp_path / f"{SCRATCH_PREFIX}{pid}-abc" for pid in (ended.pid, 1))
    for directory in (left, used):
        directory.mkdir()

    with temporary_settings(updates={PREFECT_API_URL: None}), api_server():
        assert not left.exists()
        assert used.exists()
