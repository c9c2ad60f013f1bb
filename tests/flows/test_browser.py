"""All of an operator's work in Prefect's UI, by a browser, on what `make up` has started; the report on a phone.

With OUTRIDER_SCREENSHOTS=DIR it leaves pictures of what it saw.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright
from pydantic import BaseModel

from flows.capture_states import capture_states
from flows.retrain import retrain
from flows.train_draft import train_draft
from flows.watch_data import watch_data
from tests.operated_site import Site, running
from tests.tiny_runs import (
    ROOT,
    STAGES,
    Values,
    environment,
    outrider,
    started_by,
    tiny_values,
    wait_for,
)

CHROMIUM = shutil.which("chromium")
FLOWS = {flow.name: flow for flow in (train_draft, watch_data, retrain, capture_states)}
MILLISECONDS, RUN_MILLISECONDS = 30_000, 120_000
"""Time for a page, and for a run, on a machine that does other things too."""
TRIES = 5
"""For a button: SQLite, which make up begins with, answers 503 where two write at once."""
SCROLL = """log => {
    const lists = [...log.querySelectorAll('*')].filter(one => one.scrollHeight > one.clientHeight);
    const list = lists.find(one => getComputedStyle(one).overflowY === 'auto');
    const before = list?.scrollTop;
    list?.scrollBy(0, list.clientHeight / 2);
    return list?.scrollTop === before;
}"""
"""Scrolls the list within a part of a page, and says whether it was at its end."""
PHONE = {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.operate,
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
    ),
]


@dataclass(frozen=True)
class Run:
    """A run that was started in the UI."""

    id: str
    values: Values


class Ui:
    """Prefect's UI in a browser that reaches nothing else."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site, self.page = site, page
        self.address = site.api.removesuffix("/api")
        self.refused: set[str | None] = set()
        """Other hosts that the UI has asked for something."""
        page.route(lambda url: not url.startswith(self.address), self._refuse)

    def _refuse(self, route: Route) -> None:
        self.refused.add(urlsplit(route.request.url).hostname)
        route.abort()

    def open_form(self, deployment: str) -> None:
        """Go to the form of a run with parameters of its own."""
        self.page.goto(self.address)
        self.page.get_by_role("link", name="Deployments", exact=True).click()
        row = self.page.get_by_role("row").filter(has_text=deployment)
        row.get_by_role("link", name=deployment, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        self.field("settings").first.wait_for()

    def field(self, title: str, within: Locator | None = None) -> Locator:
        """The part of the form under a title: a field, or a box of fields."""
        label = re.compile(rf"^{title}( \(Optional\))?$")
        return (within or self.page).locator("label", has_text=label).locator("xpath=../../..").last

    def fill(self, box: str, title: str, value: object) -> None:
        """Type a value into the field of a box."""
        field = self.field(title, self.field(box))
        field.locator("textarea, input:not([aria-hidden])").fill(str(value))

    def choose(self, box: str, title: str, value: str) -> list[str]:
        """Choose from a drop-down; returns what it offers."""
        self.field(title, self.field(box)).get_by_label(f"Select {title}").click()
        options = self.page.get_by_role("option")
        offered = options.all_inner_texts()
        options.filter(has_text=re.compile(rf"^{value}$")).click()
        return offered

    def submit(self) -> str:
        """Send the form; returns the id of its run, whose page is open then."""
        for _ in range(TRIES):
            with self.page.expect_response(lambda one: "/create_flow_run" in one.url) as response:
                self.page.get_by_role("button", name="Submit").click()
            if response.value.ok:
                run_id = str(response.value.json()["id"])
                self.open_run(run_id, "Logs")
                return run_id
        raise AssertionError("the server made no run")

    def open_run(self, run_id: str, tab: str) -> Locator:
        """Go to a tab of a run's page; returns it."""
        self.page.goto(f"{self.address}/v2/runs/flow-run/{run_id}?tab={tab.replace(' ', '')}")
        tabs = self.page.get_by_role("tab", name=tab)
        expect(tabs).to_have_attribute("aria-selected", "true")
        return self.page.get_by_role("tabpanel").first

    def open_artifact(self, run_id: str, key: str) -> Locator:
        """Open one of a run's artifacts as one does by clicking; returns what it shows."""
        self.open_run(run_id, "Artifacts").get_by_text(key, exact=True).click()
        shown = self.page.get_by_test_id("markdown-display")
        shown.wait_for()
        return shown

    def ask(self, item: str, confirmation: str) -> None:
        """Choose from the menu of the run's page, and confirm; again while the server's database is locked."""
        for _ in range(TRIES):
            self.page.get_by_role("button", name="Open menu").first.click()
            self.page.get_by_role("menuitem", name=item, exact=True).click()
            button = self.page.get_by_role("alertdialog").get_by_role("button", name=confirmation)
            with self.page.expect_response(lambda one: "/set_state" in one.url) as response:
                button.click()
            if response.value.ok:
                return
            self.page.reload()
        raise AssertionError(f"the server refused {item}")

    def wait_for_state(self, *names: str) -> None:
        """Wait until the run's page, on a tab without other runs, shows one of these states by itself."""
        state = self.page.get_by_text(re.compile(f"^({'|'.join(names)})$")).first
        state.wait_for(timeout=RUN_MILLISECONDS)

    def read_log(self) -> str:
        """All that the tab of the log shows; it holds only the lines in sight, so it is scrolled through."""
        log, text, at_end = self.page.get_by_role("tabpanel").first, "", False
        log.get_by_text("INFO").first.wait_for()
        while not at_end:
            self.page.wait_for_timeout(250)
            text += log.inner_text()
            at_end = log.evaluate(SCROLL)
        return text

    def copy_run(self, run: Run) -> None:
        """Open the form with the parameters of a run."""
        self.open_run(run.id, "Details")
        self.page.get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name="Copy to new run").click()
        self.field("settings").first.wait_for()


def snap(page: Page, name: str, part: Locator | None = None) -> None:
    """Leave a picture of what the page shows, from a part of it on, where pictures are asked for."""
    if directory := os.environ.get("OUTRIDER_SCREENSHOTS"):
        page.wait_for_timeout(1000)  # artifacts are drawn twice
        if part is not None:
            part.evaluate("one => one.scrollIntoView()")
        page.screenshot(path=Path(directory, f"{name}.png"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def ui(site: Site, browser: Browser) -> Iterator[Ui]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(MILLISECONDS)
    expect.set_options(timeout=MILLISECONDS)
    yield Ui(site, page)
    page.close()


@pytest.fixture(scope="module")
def run(ui: Ui, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A completed run, whose settings were typed into the form of train-draft."""
    values = tiny_values(tmp_path_factory.mktemp("tiny"))
    ui.open_form("train-draft")
    ui.fill("settings", "Name", "by-hand")
    ui.fill("settings", "Store", values["store"])
    ui.fill("Verifier", "Model", values["verifier"]["model"])
    ui.fill("Data", "Sources", values["data"]["sources"][0])
    ui.fill("Capture", "GPUs", 1)
    ui.fill("Capture", "Rows per shard", 8)
    ui.fill("Vocabulary", "Draft size", 128)
    ui.fill("Split", "Val ratio", 0.2)
    ui.fill("Split", "Holdout sources", "unseen")
    ui.fill("Train", "Epochs", 3)
    ui.fill("Train", "Tokens per batch", 128)
    assert ui.choose("Train", "Schedule", "linear") == ["cosine", "linear", "constant"]
    ui.fill("Evaluate", "Prompts", 4)
    ui.fill("Evaluate", "Max new tokens", 12)
    ui.field("Name", ui.field("settings")).scroll_into_view_if_needed()
    snap(ui.page, "form")
    run_id = ui.submit()
    ui.wait_for_state("Completed", "Failed", "Crashed")
    return Run(run_id, values)


@pytest.mark.parametrize("deployment", sorted(FLOWS))
def test_the_form_gives_every_field_a_title_and_a_help_text(
    site: Site, ui: Ui, deployment: str
) -> None:
    found = site.get(f"/deployments/name/{deployment}/{deployment}")
    schema = found["parameter_openapi_schema"]

    fields = dict(fields_of(schema, schema["properties"]))
    choices = {
        path: set(allowed)
        for path, field in fields.items()
        for part in [field, *field.get("anyOf", [])]
        if (allowed := part.get("enum"))
    }

    assert len(fields) > 20
    for path, field in fields.items():
        assert field.get("title"), path
        assert field.get("description"), path
        assert field.get("default", None) != {}, path
    assert choices == literals_of(FLOWS[deployment])

    ui.page.goto(f"{ui.address}/v2/deployments/deployment/{found['id']}/run")
    ui.field("settings").first.wait_for()
    shown = ui.page.locator("label").evaluate_all(
        "all => all.map(one => [one.innerText, one.parentElement.querySelector('p')?.innerText])"
    )
    titles = [title.removesuffix(" (Optional)") for title, about in shown if about]
    assert titles == [*(field["title"] for field in fields.values()), "Start"]
    assert {title for title, about in shown if not about} == {
        "Run Name",
        "Enforce Parameter Schema",
    }
    # those of a union show once its type is chosen
    plain = [path for path in choices if "enum" in fields[path]]
    assert ui.page.locator("[aria-label^='Select ']").count() == len(plain)


def test_a_box_of_the_form_can_be_written_as_json(ui: Ui) -> None:
    ui.open_form("retrain")
    ui.field("settings").get_by_role("button", name="Open menu").first.click()
    ui.page.get_by_role("menuitem", name="Use JSON Input").click()

    expect(ui.page.locator(".cm-editor")).to_contain_text('"name": "smollm2-demo"')


def fields_of(schema: Values, properties: Values, path: str = "") -> Iterator[tuple[str, Values]]:
    """Each property at every depth by its dotted path, what it refers to filled in."""
    for name, field in properties.items():
        definition = {}
        if reference := field.get("$ref"):
            definition = schema["definitions"][reference.rsplit("/", 1)[-1]]
        yield path + name, definition | field
        yield from fields_of(schema, definition.get("properties", {}), f"{path}{name}.")


def literals_of(flow: Any) -> dict[str, set[Any]]:
    """Dotted path -> choices, of every parameter and setting that is annotated with a Literal."""
    names = flow.fn.__code__.co_varnames[: flow.fn.__code__.co_argcount + 10]
    given = {k: v for k, v in flow.fn.__annotations__.items() if k in names and k != "return"}
    return dict(_literals(given))


def _literals(annotations: dict[str, Any], path: str = "") -> Iterator[tuple[str, set[Any]]]:
    for name, annotation in annotations.items():
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            inner = {key: field.annotation for key, field in annotation.model_fields.items()}
            yield from _literals(inner, f"{path}{name}.")
        for part in (annotation, *get_args(annotation)):
            if get_origin(part) is Literal:
                yield path + name, set(get_args(part))


def test_a_run_gets_what_was_typed_into_the_form(site: Site, run: Run) -> None:
    found = site.get(f"/flow_runs/{run.id}")

    assert found["state_name"] == "Completed", found["state"]["message"]
    settings = found["parameters"]["settings"]
    assert settings["name"] == "by-hand"
    assert settings["data"]["sources"] == run.values["data"]["sources"]
    assert settings["train"]["epochs"] == 3
    assert settings["train"]["tokens_per_batch"] == 128
    assert settings["train"]["schedule"] == "linear"
    assert settings["split"]["holdout_sources"] == ["unseen"]
    assert settings["train"]["ttt_steps"] == 3  # as the deployment has it


def test_stages_and_the_lines_of_child_processes_are_on_the_runs_page(ui: Ui, run: Run) -> None:
    stages = ui.open_run(run.id, "Task Runs")
    for stage in STAGES:
        expect(stages.get_by_text(stage, exact=True)).to_be_visible()
    expect(stages.get_by_text("11 Completed")).to_be_visible()

    ui.open_run(run.id, "Logs")
    log = ui.read_log()
    assert re.search(r"\[train \d+\] .* 14 samples of 779 tokens to train on", log)
    assert "train: 21 of 21 steps (100 %)" in log
    assert "evaluate: computed" in log


def test_artifacts_show_data_loss_and_acceptance(ui: Ui, run: Run) -> None:
    data = ui.open_artifact(run.id, "data-report")
    pictures = {"Length of the samples", "Coverage by the most frequent tokens"}
    assert_pictures(data, pictures)
    expect(data).to_contain_text("⟦On the tide there is this and that to say.<|im_end|>⟧")
    expect(data.get_by_role("row", name="seen 14 4 0", exact=True)).to_be_visible()
    expect(data.get_by_role("row", name="train 100.00%")).to_be_visible()
    snap(ui.page, "data-report", data.get_by_role("row", name="source"))

    train = ui.open_artifact(run.id, "stage-train")
    assert_pictures(train, {"Loss", "Accuracy by drafted token"})
    snap(ui.page, "training")
    evaluation = ui.open_artifact(run.id, "stage-evaluate")
    assert_pictures(evaluation, {"Acceptance by position"})

    artifacts = ui.open_run(run.id, "Artifacts")
    artifacts.get_by_text("progress-train", exact=True).click()
    expect(ui.page.get_by_test_id("progress-display")).to_have_text("Progress: 100%")


def assert_pictures(page: Locator, names: set[str]) -> None:
    """Pictures of these names are there, and the browser has drawn them."""
    for name in names:
        image = page.get_by_role("img", name=name, exact=True)
        expect(image).to_be_visible()
        width = image.evaluate("one => one.decode().then(() => one.naturalWidth)")
        assert width > 100, name


def test_a_running_run_shows_its_progress_and_a_cancelled_one_leaves_no_process(
    site: Site, ui: Ui, run: Run
) -> None:
    before = len(site.processes())
    ui.copy_run(run)
    ui.fill("Train", "Epochs", 10_000)
    run_id = ui.submit()
    ui.wait_for_state("Running")
    artifacts = {
        "artifacts": {"key": {"any_": ["progress-train"]}, "flow_run_id": {"any_": [run_id]}}
    }
    wait_for(lambda: site.post("/artifacts/filter", artifacts), seconds=60)
    ui.open_run(run_id, "Artifacts").get_by_text("progress-train", exact=True).click()
    shown = ui.page.get_by_test_id("progress-display").inner_text()
    assert 0 < float(shown.removeprefix("Progress: ").removesuffix("%")) < 100
    expect(ui.page.get_by_text(re.compile("train: .* of 70,000 steps")).first).to_be_visible()
    pids = {process.pid for process in site.processes()}
    assert len(pids) > before

    ui.open_run(run_id, "Task Runs").get_by_text("1 Running").wait_for()
    snap(ui.page, "running")
    ui.open_run(run_id, "Logs")
    ui.ask("Cancel", "Cancel Flow Run")
    ui.wait_for_state("Cancelled")

    wait_for(lambda: len(site.processes()) == before, seconds=30)
    assert [one for pid in pids for one in started_by(pid)] == []
    assert record_of(run, run_id)["state"] == "stopped"


def test_a_failed_run_goes_on_by_retry_and_its_draft_is_held_against_the_one_in_service(
    site: Site, ui: Ui, run: Run, tmp_path: Path
) -> None:
    good = Path(run.values["data"]["sources"][0])
    source = tmp_path / "more.jsonl"
    source.write_text("{no json\n")
    ui.copy_run(run)
    ui.fill("Data", "Sources", source)
    ui.fill("Train", "Seed", 1)
    run_id = ui.submit()
    ui.wait_for_state("Failed")
    page = ui.open_artifact(run_id, "run-end")
    expect(page).to_contain_text("more.jsonl line 1: not JSON")
    expect(page).to_contain_text("press Retry")

    shutil.copy(good, source)
    ui.open_run(run_id, "Logs")
    ui.ask("Retry", "Retry")
    ui.wait_for_state("Completed")

    stages = record_of(run, run_id)["stages"]
    reused = [name for name in STAGES if stages[name]["state"] == "reused"]
    assert reused == [*STAGES[: STAGES.index("train")]]
    task_runs = ui.open_run(run_id, "Task Runs")  # of both tries: load_verifier is there twice
    expect(task_runs.get_by_text(f"{len(reused) + 1} Reused, 1 Failed")).to_be_visible()
    snap(ui.page, "retried")
    promotion = ui.open_artifact(run_id, "stage-promote")
    assert_pictures(promotion, {"Acceptance by position"})
    row = promotion.get_by_role("row", name=re.compile(r"^all prompts \d\.\d{3} \d\.\d{3}$"))
    expect(row).to_be_visible()
    assert site.get(f"/flow_runs/{run_id}")["run_count"] == 2


def test_the_ui_asks_nobody_else_but_the_host_that_the_page_for_operators_names(ui: Ui) -> None:
    (host,) = re.findall("`([a-z.-]+amplitude.com)`", (ROOT / "OPERATE.md").read_text())
    assert ui.refused <= {host}


def record_of(run: Run, flow_run: str) -> Values:
    """The newest record of a flow run in the store."""
    files = sorted(Path(run.values["store"], "run_records").glob("[0-9]*.json"))
    records = [json.loads(file.read_text()) for file in files]
    found: Values = [one for one in records if one["flow_run"] == flow_run][-1]
    return found


def test_the_report_is_readable_on_a_phone_and_loads_nothing(
    browser: Browser, run: Run, tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    name = record_of(run, run.id)["run"]
    command = ["report", name, "--store", run.values["store"], "--output", target]
    assert outrider(*command, env=environment(tmp_path)).returncode == 0
    page = browser.new_page(viewport=PHONE, is_mobile=True)
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))

    page.goto(target.as_uri())

    assert requests == [target.as_uri()]
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    heads = page.locator("h2").all_inner_texts()
    assert heads == [
        "Acceptance by position", "Costs", "Loss", "Accuracy by drafted token", "Epochs",
        "Drafted and accepted", "Data", "What each stage made", "Settings",
    ]  # fmt: skip
    for svg in page.locator("svg").all():
        box = svg.bounding_box()
        assert box is not None
        assert 300 < box["width"] <= PHONE["width"]
    sizes = page.locator("p, td, pre").evaluate_all(
        "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 13
    kinds = page.locator("p.text span").evaluate_all("all => all.map(one => one.className)")
    assert len(kinds) > 10
    assert set(kinds) <= {"own", "accepted", "corrected"}
    colors = [
        page.locator(f".{kind}").first.evaluate("one => getComputedStyle(one).backgroundColor")
        for kind in ("accepted", "corrected")
    ]
    assert colors == ["rgb(185, 235, 194)", "rgb(255, 217, 194)"]
    expect(page.locator("pre mark").first).to_contain_text("On the tide")
    snap(page, "report-on-a-phone")
    page.close()
