"""make up, and what goes on by itself then: landed data is trained on once, the better draft is promoted; make down."""

from pathlib import Path

import pytest

from storage import drafts
from storage.store import Store
from tests.operated_site import ENDLESS, Site, land, records, start_training
from tests.tiny_runs import Values, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.operate]

NAME = "verifier"  # the last part of the tiny verifier's path


def test_landed_data_is_trained_on_once_and_both_drafts_are_judged(
    site: Site, values: Values
) -> None:
    assert site.watch(values) == "DataLanded"
    (first,) = site.all_ended(values["name"], 1)
    assert first["state_name"] == "Completed", first["state"]["message"]
    assert site.watch(values) == "NothingNew"

    land(values, "b.jsonl", range(100, 108))
    assert site.watch(values) == "DataLanded"
    _, second = site.all_ended(values["name"], 2)
    assert second["state_name"] == "Completed", second["state"]["message"]
    assert site.watch(values) == "NothingNew"
    assert len(site.retrains(values["name"])) == 2

    before, after = records(values)
    assert before["promotion"]["promoted"]
    assert after["promotion"]["before"] is not None  # on the same prompts
    serving = drafts.current(Store(values["store"]), NAME)
    assert serving is not None
    assert serving.run == (after if after["promotion"]["promoted"] else before)["run"]
    old = set(before["stages"]["capture"]["parts"])
    assert old < set(after["stages"]["capture"]["parts"])
    assert after["flow_run"] == second["id"]


def test_an_event_that_was_lost_is_sent_again(
    site: Site, values: Values, prefect_api: str, tmp_path: Path
) -> None:
    assert "was sent" in site.watch_here(values, tmp_path, prefect_api)
    assert site.retrains(values["name"]) == []

    assert "was sent" in site.watch_here(values, tmp_path, site.api)
    (run,) = site.all_ended(values["name"], 1)
    assert run["state_name"] == "Completed"
    assert "nothing new" in site.watch_here(values, tmp_path, site.api)


def test_of_two_landings_the_second_run_waits_and_ends_at_once_when_nothing_is_left(
    site: Site, values: Values, tmp_path: Path
) -> None:
    site.pause(paused=True)
    try:
        for number, name in enumerate(("b.jsonl", "c.jsonl"), start=1):
            land(values, name, range(100 * number, 100 * number + 4))
            assert "was sent" in site.watch_here(values, tmp_path, site.api)
            wait_for(lambda: len(site.retrains(values["name"])) == number, seconds=40)  # noqa: B023
            # a retrain that waits for this very data keeps the next watch from a second one
            assert "is to train on it" in site.watch_here(values, tmp_path, site.api)
    finally:
        site.pause(paused=False)
    first, second = site.all_ended(values["name"], 2)

    assert sorted([first["state_name"], second["state_name"]]) == ["Completed", "NothingNew"]
    early, late = sorted((first, second), key=lambda run: str(run["start_time"]))
    assert str(early["end_time"]) <= str(late["start_time"])
    (record,) = records(values)
    assert len(record["stages"]["collect"]["parts"]) == 3


def test_a_failed_run_leaves_a_page_with_stage_cause_and_next_step(
    site: Site, values: Values
) -> None:
    Path(values["data"]["sources"][0], "b.jsonl").write_text("{no json\n")

    run = site.finish(site.start("retrain", {"settings": values}))

    assert run["state_name"] == "Failed"
    page = site.page_of(run["id"])
    assert "**stage** collect" in page
    assert "b.jsonl line 1: not JSON" in page
    assert "Retry" in page


def test_a_run_whose_machine_is_lost_is_crashed_within_two_minutes_and_a_retry_goes_on(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=ENDLESS, deployment="train-draft")
    site.kill("worker")
    said = wait_for(lambda: site.crashed(run_id), seconds=120)

    assert "gave no sign of life for 90 s" in said
    assert site.operate("up").returncode == 0  # another worker
    site.retry(run_id)
    wait_for(lambda: len(records(values)) == 2, seconds=60)
    wait_for(lambda: "capture" in records(values)[1]["stages"], seconds=60)
    again = records(values)[1]
    assert {one["state"] for one in again["stages"].values()} == {"reused"}
    assert again["flow_run"] == run_id
    assert site.cancel(run_id)["state_name"] == "Cancelled"


def test_a_run_without_a_worker_can_be_cancelled_and_the_next_need_not_wait_for_it(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=ENDLESS, deployment="train-draft")
    site.kill("worker")

    cancelled = site.cancel(run_id)

    assert cancelled["state_name"] == "Cancelled"
    assert "no worker ended it within 60 s" in cancelled["state"]["message"]
    limit = site.get("/deployments/name/train-draft/train-draft")["global_concurrency_limit"]
    assert limit["active_slots"] == 0
    assert site.operate("up").returncode == 0


def test_make_up_again_changes_nothing_and_make_down_leaves_no_process(
    site: Site, values: Values
) -> None:
    watching = "/deployments/name/watch-data/watch-data"
    (schedule,) = site.get(watching)["schedules"]
    assert not schedule["active"]
    deployment = site.get(watching)["id"]
    for path, change in (
        (f"/schedules/{schedule['id']}", {"active": True}),
        ("", {"parameters": {"settings": values}}),
    ):
        site.patch(f"/deployments/{deployment}{path}", change)
    by_hand = {"cron": "7 3 * * *", "timezone": None, "day_or": True}
    other = {"schedule": by_hand, "active": False, "parameters": {"settings": values}}
    site.post(f"/deployments/{deployment}/schedules", [other])
    schedules = site.get(watching)["schedules"]
    pids, automations = site.pids(), site.post("/automations/filter", {})

    assert site.operate("up").returncode == 0

    assert site.pids() == pids
    assert site.get(watching)["parameters"] == {"settings": values}
    assert site.get(watching)["schedules"] == schedules
    assert sorted(one["active"] for one in schedules) == [False, True]
    assert {one["id"] for one in site.post("/automations/filter", {})} == {
        one["id"] for one in automations
    }
    values["train"] |= {"epochs": 10_000}
    site.start("train-draft", {"settings": values})
    wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=90)

    done = site.operate("down")

    assert done.returncode == 0, done.stderr
    assert "stopped: worker, server; " in done.stdout
    assert site.processes() == []
    assert records(values)[0]["state"] == "stopped"
    assert list(site.state.rglob("prefect.db"))
    assert site.operate("down").stdout == "nothing runs\n"
