"""Server, worker and run, each ended by SIGKILL or by make down: what goes on, what is told, and how it goes on."""

from pathlib import Path

import httpx
import pytest

from tests.operated_site import ENDLESS, Site, records, start_training
from tests.tiny_runs import Values, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.operate]


def goes_on_after_capture(site: Site, values: Values, run_id: str) -> None:
    """A retry of a run that was ended in its training reuses all that was before it."""
    site.retry(run_id)
    wait_for(lambda: len(records(values)) == 2, seconds=90)
    wait_for(lambda: "capture" in records(values)[1]["stages"], seconds=60)
    again = records(values)[1]
    assert {one["state"] for one in again["stages"].values()} == {"reused"}
    assert again["flow_run"] == run_id


def test_a_run_goes_on_while_the_server_is_killed_and_started_again(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=120, deployment="train-draft")
    lease = site.get(f"/flow_runs/{run_id}")["state"]["state_details"][
        "deployment_concurrency_lease_id"
    ]
    worker = site.pids()["worker"]

    site.kill("server")
    assert site.operate("up").returncode == 0

    assert site.pids()["worker"] == worker
    # Prefect ends a run whose lease the server has forgotten, within minutes
    renewed = httpx.post(
        f"{site.api}/v2/concurrency_limits/leases/{lease}/renew",
        json={"lease_duration": 300},
        timeout=30,
    )
    assert renewed.status_code in {200, 204}, renewed.text
    run = site.finish(run_id)
    assert run["state_name"] == "Completed", run["state"]["message"]
    assert run["run_count"] == 1
    assert [one["state"] for one in records(values)] == ["completed"]


def test_a_server_that_is_away_costs_a_run_the_pages_of_its_stages_and_not_its_work(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=40, deployment="train-draft")

    site.kill("server")
    wait_for(lambda: records(values)[0]["state"] != "running", seconds=90)
    assert records(values)[0]["state"] == "completed"

    assert site.operate("up").returncode == 0
    assert site.finish(run_id)["state_name"] == "Completed"


def test_with_its_worker_killed_a_run_ends_as_crashed_and_a_retry_goes_on(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=ENDLESS, deployment="train-draft")

    site.kill("worker", with_children=False)

    wait_for(lambda: site.crashed(run_id), seconds=60)
    wait_for(lambda: len(site.processes()) == 1, seconds=30)  # the server
    page = site.page_of(run_id)
    assert "**stage** train" in page
    assert "see that a worker runs, then press *Retry*" in page
    assert site.operate("up").returncode == 0
    goes_on_after_capture(site, values, run_id)
    assert site.cancel(run_id)["state_name"] == "Cancelled"


def test_after_the_loss_of_the_whole_machine_make_up_finds_out_which_runs_were_lost(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=ENDLESS, deployment="train-draft")
    # a heartbeat has to have been seen; the first is sent at once
    wait_for(lambda: heartbeats(site, run_id) >= 1, seconds=60)

    for name in ("server", "worker"):
        site.kill(name)
    assert site.operate("up").returncode == 0

    assert "gave no sign of life for 90 s" in wait_for(lambda: site.crashed(run_id), seconds=150)
    limit = site.get("/deployments/name/train-draft/train-draft")["global_concurrency_limit"]
    assert limit["active_slots"] == 0  # the next run does not wait for the lost one


def test_a_run_that_make_down_has_cancelled_goes_on_by_a_retry_and_its_data_stays_new(
    site: Site, values: Values, tmp_path: Path
) -> None:
    values["train"] |= {"epochs": ENDLESS}
    assert "was sent" in site.watch_here(values, tmp_path, site.api)
    wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=120)
    (run,) = site.retrains(values["name"])

    done = site.operate("down")

    assert "1 runs were cancelled: Retry in the UI goes on with them" in done.stdout
    assert site.processes() == []
    assert site.operate("up").returncode == 0
    assert site.get(f"/flow_runs/{run['id']}")["state_name"] == "Cancelled"
    goes_on_after_capture(site, values, run["id"])
    assert site.cancel(run["id"])["state_name"] == "Cancelled"
    assert "was sent" in site.watch_here(values, tmp_path, site.api)  # not on hold
    wait_for(lambda: len(site.retrains(values["name"])) == 2, seconds=40)
    other = next(one for one in site.retrains(values["name"]) if one["id"] != run["id"])
    assert site.cancel(other["id"])["state_name"] == "Cancelled"


def heartbeats(site: Site, run_id: str) -> int:
    """Signs of life of a run that the server has kept."""
    only = {
        "filter": {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run_id}"]},
        }
    }
    return int(site.post("/events/filter", only)["total"])
