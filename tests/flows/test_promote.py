"""Drafts in service: a better one is promoted, a worse one kept, by hand and back again; prune keeps what is served."""

import json
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from storage import drafts
from storage.store import Store
from tests.tiny_runs import TinyRun, computed, manifests, run_flow, states, write_settings

NAME = "verifier"  # the last part of the tiny verifier's path
ANY = {"margin": -16, "max_source_loss": 16, "min_distinct_bigrams": 0}
"""A gate that everything passes."""


def serving(copy: TinyRun) -> str:
    """Run whose draft is in service."""
    found = drafts.current(Store(str(copy.store)), NAME)
    assert found is not None
    return found.run


@pytest.fixture
def served(tiny, tmp_path):
    """A store with one draft in service."""
    return tiny.copy(tmp_path)


def test_the_first_draft_is_put_in_service_and_running_again_changes_nothing(served, prefect_api):
    pointer = json.loads((served.store / f"drafts/{NAME}/current.json").read_text())
    assert pointer["run"] == served.result["run"]
    assert pointer["acceptance_length"] == served.result["acceptance_length"]
    before = manifests(served.store)
    again = run_flow(served.values, prefect_api)
    assert set(states(again).values()) == {"reused"}
    assert again["promotion"]["in service"]
    assert serving(served) == served.result["run"]
    assert manifests(served.store) == before


def test_a_speculator_that_is_exported_anew_is_found_where_it_lies_now(served, prefect_api):
    first = drafts.current(Store(str(served.store)), NAME)
    shutil.rmtree(served.store / "speculator")
    record = run_flow(served.values, prefect_api)
    assert computed(record) == ["export"]
    now = drafts.current(Store(str(served.store)), NAME)
    assert now.name == first.name
    assert now.location == record["speculator"] != first.location
    pointer = json.loads((served.store / f"drafts/{NAME}/current.json").read_text())
    assert pointer["speculator"] == record["speculator"]


def test_a_draft_that_is_no_better_is_kept_and_the_run_says_why(served, prefect_api):
    still = {"lr": 1e-30}  # what it starts with is what it ends with
    record = run_flow(served.changed(train=still), prefect_api)
    assert computed(record) == ["train", "evaluate", "export", "promote"]
    assert record["state"] == "completed"
    promotion = record["promotion"]
    assert (promotion["promoted"], promotion["in service"]) == (False, False)
    assert promotion["in service before"] == served.result["run"]
    assert promotion["gain"] == pytest.approx(
        record["acceptance_length"] - served.result["acceptance_length"], abs=1e-3
    )
    assert "less than promote.margin 0.02" in promotion["reasons"][0]
    assert set(promotion["sources"]) == {"unseen"}
    assert serving(served) == served.result["run"]
    assert Path(record["speculator"]).is_dir()


def test_a_draft_that_passes_takes_the_place_and_can_be_rolled_back_for_good(
    served, prefect_api, capsys
):
    other = served.changed(train={"seed": 5}, promote=ANY)
    record = run_flow(other, prefect_api)
    assert record["promotion"]["promoted"]
    assert serving(served) == record["run"]
    # both were decoded on the same prompts
    assert record["promotion"]["before"] == served.result["acceptance_length"]

    assert main(["rollback", "--store", str(served.store)]) == 0
    assert served.result["run"] in capsys.readouterr().out
    assert serving(served) == served.result["run"]
    # running the same again does not undo what was done by hand
    again = run_flow(other, prefect_api)
    assert set(states(again).values()) == {"reused"}
    assert serving(served) == served.result["run"]
    assert not again["promotion"]["in service"]

    # by hand, and where it lies by then
    shutil.rmtree(served.store / record["stages"]["export"]["parts"][0])
    assert main(["promote", record["run"], "--store", str(served.store)]) == 1
    assert "run its settings again first" in capsys.readouterr().err
    anew = run_flow(other, prefect_api)
    assert computed(anew) == ["export"]
    assert main(["promote", record["run"], "--store", str(served.store)]) == 0
    assert serving(served) == record["run"]
    assert anew["speculator"] in capsys.readouterr().out
    capsys.readouterr()
    assert main(["drafts", "--json", "--store", str(served.store)]) == 0
    listed = json.loads(capsys.readouterr().out)[NAME]
    assert [(one["run"], one["by"]) for one in listed] == [
        (served.result["run"], "gate"),
        (record["run"], "gate"),
        (record["run"], "hand"),
    ]
    assert [one["in_service"] for one in listed] == [False, False, True]
    assert main(["rollback", "--store", str(served.store)]) == 0
    assert main(["rollback", "--store", str(served.store)]) == 1
    assert "was the first: there is none to go back to" in capsys.readouterr().err


def test_a_draft_of_another_name_is_not_compared_and_promotion_can_be_off(served, prefect_api):
    apart = {"draft_name": "code"}
    record = run_flow(served.changed(train={"seed": 5}, promote=apart), prefect_api)
    assert (record["promotion"]["draft"], record["promotion"]["gain"]) == ("code", None)
    store = Store(str(served.store))
    assert sorted(drafts.names(store)) == ["code", NAME]
    assert serving(served) == served.result["run"]
    off = run_flow(served.changed(train={"seed": 6}, promote={"enabled": False}), prefect_api)
    assert off["promotion"]["reasons"] == ["promote.enabled is false"]
    by_heart = served.changed(train={"seed": 7}, evaluate={"side": "train"}, promote=ANY)
    (reason,) = run_flow(by_heart, prefect_api)["promotion"]["reasons"]
    assert reason == "it was evaluated on what it was trained on (evaluate.side is train)"
    assert serving(served) == served.result["run"]


def test_a_draft_in_service_that_can_not_be_evaluated_any_more_is_replaced(served, prefect_api):
    found = drafts.current(Store(str(served.store)), NAME)
    assert found is not None
    (served.store / found.recipe["parts"]["weights"] / "manifest.json").unlink()
    record = run_flow(served.changed(train={"seed": 5}), prefect_api)
    assert record["promotion"]["gain"] is None
    assert serving(served) == record["run"]


def test_pruning_keeps_the_drafts_in_service_and_before(served, prefect_api, tmp_path, capsys):
    record = run_flow(served.changed(train={"seed": 5}, promote=ANY), prefect_api)
    last = run_flow(served.changed(train={"seed": 6}, promote=ANY), prefect_api)
    store = Store(str(served.store))
    first, second, third = drafts.history(store, NAME)
    assert (second.run, third.run) == (record["run"], last["run"])
    # all are given up but one of another kind
    other = run_flow(served.changed(train={"lr": 1e-30}), prefect_api)
    given_up = [served.result["run"], record["run"], last["run"]]
    file = write_settings(served.values, tmp_path / "settings.yaml")
    options = [word for run in given_up for word in ("--run", run)]
    assert main(["prune", str(file), *options]) == 0, capsys.readouterr().err
    for promotion in (second, third):
        for path in promotion.artifacts:
            assert (served.store / path / "manifest.json").is_file(), path
    assert not (served.store / first.recipe["parts"]["weights"]).exists()
    assert main(["rollback", "--store", str(served.store)]) == 0
    assert Path(other["speculator"]).is_dir()
    assert serving(served) == record["run"]


def test_what_cannot_be_promoted_is_said(served, capsys, tmp_path):
    assert main(["promote", "2000", "--store", str(served.store)]) == 1
    assert "0 runs of the store" in capsys.readouterr().err
    assert main(["rollback", "nosuch", "--store", str(served.store)]) == 1
    assert f"no draft 'nosuch' is in service in {served.store}; there are: {NAME}" in (
        capsys.readouterr().err
    )
    assert main(["rollback", "--store", str(tmp_path / "empty")]) == 1
    assert "no draft is in service in" in capsys.readouterr().err
    assert main(["drafts", "--store", str(tmp_path / "empty")]) == 0
    assert "no draft is in service yet" in capsys.readouterr().out
