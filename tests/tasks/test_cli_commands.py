"""estimate, status, report and verify, on a completed tiny run."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.cli import main
from tests.tiny_runs import ROOT, STAGES, manifests, write_settings


@pytest.fixture
def file(tiny, tmp_path: Path) -> str:
    return str(write_settings(tiny.values, tmp_path / "settings.yaml"))


def tokens_of(store: Path) -> int:
    (samples,) = store.glob("samples/*/attempt-*/samples.parquet")
    return sum(len(row) for row in pq.read_table(samples)["input_ids"].to_pylist())


def test_an_estimate_before_the_run_counts_tokens_bytes_and_shards(tiny, tmp_path, capsys):
    values = tiny.values | {"store": str(tmp_path / "store")}
    file = write_settings(values, tmp_path / "settings.yaml")

    assert main(["estimate", str(file), "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    tokens = tokens_of(tiny.store)
    assert figures["conversations"] == figures["samples"] == figures["missing_samples"] == 24
    assert figures["tokens"] == figures["missing_tokens"] == tokens
    # 3 captured layers and the last state, 64 values of 2 bytes
    assert figures["bytes_per_token"] == (3 + 1) * 64 * 2
    assert figures["state_bytes"] == figures["missing_bytes"] == tokens * 512
    assert figures["shards"] == 3
    assert figures["captured_samples"] == 0
    assert figures["layers"] == [2, 4, 5]
    assert figures["draft_size"] == 128
    flops = 2 * figures["verifier_parameters"] * tokens
    assert figures["capture_gpu_hours"] == pytest.approx(flops / 400e12 / 3600)
    assert 0 < figures["free_bytes"] <= shutil.disk_usage(tmp_path).total
    assert not (tmp_path / "store" / "states").exists()


def test_an_estimate_after_the_run_finds_all_samples_captured(tiny, tmp_path, file, capsys):
    assert main(["estimate", file, "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert figures["captured_samples"] == 24
    assert (figures["missing_samples"], figures["missing_bytes"], figures["shards"]) == (0, 0, 0)


def test_an_estimate_shows_its_arithmetic(tiny, file, capsys):
    assert main(["estimate", file]) == 0

    text = capsys.readouterr().out
    tokens = tokens_of(tiny.store)
    assert f"{tokens:,} tokens x (3 layers + 1) x 64 values x 2 bytes" in text
    assert "24 samples are there, 0 quarantined; 0 to do" in text
    assert re.search(
        r"^draft      1 llama layer of hidden size 64, .*vocabulary of 128 tokens$",
        text,
        re.MULTILINE,
    )


def test_an_estimate_of_fp8_states_counts_a_byte_a_value_and_the_scales(tiny, file, capsys):
    fp8 = [file, "--set", "capture.codec=fp8"]
    assert main(["estimate", *fp8, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    tokens = tokens_of(tiny.store)
    assert figures["bytes_per_token"] == (3 + 1) * (64 + 2)
    assert figures["missing_bytes"] == tokens * 264  # nothing is captured in that codec

    assert main(["estimate", *fp8]) == 0
    arithmetic = f"{tokens:,} tokens x (3 layers + 1) x (64 values x 1 byte + a scale of 2)"
    assert arithmetic in capsys.readouterr().out


def test_an_estimate_names_a_draft_config_that_is_not_there(tiny, tmp_path, capsys):
    values = tiny.changed(draft={"config": str(tmp_path / "none.json")})
    file = write_settings(values, tmp_path / "settings.yaml")

    assert main(["estimate", str(file)]) == 1

    assert f"draft.config {tmp_path / 'none.json'}: No such file" in capsys.readouterr().err


def test_status_lists_the_runs_of_a_store(tiny, capsys):
    assert main(["status", "--store", str(tiny.store)]) == 0

    (line,) = [row for row in capsys.readouterr().out.splitlines() if tiny.result["run"] in row]
    assert "completed" in line
    assert f"{tiny.result['acceptance_length']:.2f}" in line


def test_status_tells_runs_of_one_name_apart_by_what_was_changed(tiny, tmp_path, capsys):
    copy = tiny.copy(tmp_path)
    (path,) = copy.store.glob("run_records/*.json")
    record = json.loads(path.read_text())
    record |= {"run": "99990101-000000-aaaaaa"}
    record["settings"]["train"]["lr"] = 3e-4
    (path.parent / "later.json").write_text(json.dumps(record))

    assert main(["status", "--store", str(copy.store)]) == 0

    _, first, second = capsys.readouterr().out.splitlines()
    assert "train.lr" not in first
    assert second.endswith("  train.lr=0.0003")


@pytest.mark.parametrize("name", ["latest", "whole id", "its beginning"])
def test_status_shows_the_stages_of_one_run_in_order(tiny, name, capsys):
    run = tiny.result["run"]
    run = {"latest": "latest", "whole id": run, "its beginning": run[:-2]}[name]

    assert main(["status", run, "--store", str(tiny.store), "--json"]) == 0

    record = json.loads(capsys.readouterr().out)
    assert record["run"] == tiny.result["run"]
    assert record["state"] == "completed"
    assert tuple(record["stages"]) == STAGES
    assert main(["status", run, "--store", str(tiny.store)]) == 0
    text = capsys.readouterr().out
    for stage in STAGES:
        assert re.search(rf"^{stage} +computed +\d+ +\d+\.\d  [0-9a-f]{{24}}$", text, re.MULTILINE)


def test_status_of_an_unknown_run_names_the_known_ones(tiny, capsys):
    assert main(["status", "1999", "--store", str(tiny.store)]) == 1

    error = capsys.readouterr().err
    assert "0 runs of the store" in error
    assert tiny.result["run"] in error


def test_a_store_that_does_not_exist_is_an_error_and_not_an_empty_one(tmp_path, capsys):
    assert main(["status", "--store", str(tmp_path / "typo")]) == 1
    assert "there is no store at" in capsys.readouterr().err


def test_status_of_an_empty_store_says_so(tmp_path, capsys):
    assert main(["status", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no runs yet\n"


class Page(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text = ""
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [v or "" for name, v in attrs if name in {"src", "href", "srcset", "data"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_is_one_page_that_loads_nothing(tiny, tmp_path, capsys):
    target = tmp_path / "report.html"

    assert main(["report", "latest", "--store", str(tiny.store), "--output", str(target)]) == 0

    assert capsys.readouterr().out == f"{target}\n"
    html = target.read_text()
    page = Page(html)
    assert page.loaded == []
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in html
    assert "@import" not in html
    assert f"{tiny.result['acceptance_length']:.2f}" in page.text
    assert tiny.result["run"] in page.text
    for stage in STAGES:
        assert stage in page.text
    for shard in tiny.result["stages"]["capture"]["parts"]:
        assert shard in page.text
    assert "validation loss" in page.text
    for token in (1, 2, 3):
        assert f"token {token}, train" in page.text
        assert f"token {token}, validation" in page.text
    assert "Epochs" in page.text
    assert "svg" in page.tags
    assert "<text" not in html  # it would shrink with the plot
    assert "<|im_start|>assistant" in page.text  # decoded samples, escaped


def test_verify_passes_on_a_sound_store(tiny, file, capsys):
    count = len(manifests(tiny.store))

    assert main(["verify", file]) == 0
    assert capsys.readouterr().out == f"{count} artifacts checked by sizes, problems: 0\n"
    assert main(["verify", file, "--deep"]) == 0
    assert capsys.readouterr().out == f"{count} artifacts checked by digests, problems: 0\n"


@pytest.mark.parametrize("name", ["states.safetensors", "rows.parquet", "manifest.json"])
def test_verify_deep_finds_one_flipped_bit_in_a_shard(tiny, tmp_path, name, capsys):
    copy = tiny.copy(tmp_path)
    file = str(write_settings(copy.values, tmp_path / "settings.yaml"))
    shard = (copy.store / min(manifests(copy.store, "capture"))).parent
    (harmed,) = shard.rglob(name)
    content = bytearray(harmed.read_bytes())
    content[len(content) // 2] ^= 1
    harmed.write_bytes(content)

    assert main(["verify", file]) == (1 if name == "manifest.json" else 0)
    capsys.readouterr()
    assert main(["verify", file, "--deep"]) == 1

    problem, summary, way_out = capsys.readouterr().out.splitlines()
    place = shard.relative_to(copy.store)
    if name == "manifest.json":
        assert problem == f"{shard} has no readable manifest"
    else:
        assert problem.startswith(f"{place}: {name} has the digest ")
    assert summary.endswith("problems: 1")
    assert way_out.startswith("add --repair")


def test_verify_finds_a_short_file_and_an_unreadable_manifest_and_changes_nothing(
    tiny, tmp_path, capsys
):
    copy = tiny.copy(tmp_path)
    file = str(write_settings(copy.values, tmp_path / "settings.yaml"))
    (split,) = copy.store.glob("split/*/attempt-*/split.parquet")
    split.write_bytes(b"short")
    (vocab,) = copy.store.glob("vocab_map/*/manifest.json")
    vocab.write_text("{")
    before = manifests(copy.store)

    assert main(["verify", file]) == 1

    out = capsys.readouterr().out
    assert "split.parquet has 5 bytes, its manifest says" in out
    assert "has no readable manifest" in out
    assert out.splitlines()[-2].endswith("problems: 2")
    assert manifests(copy.store) == before


def test_a_report_that_cannot_be_written_says_where_and_how_to_go_on(tiny, tmp_path, capsys):
    target = tmp_path / "none" / "page.html"

    status = main(["report", "latest", "--store", str(tiny.store), "--output", str(target)])

    assert status == 1
    assert capsys.readouterr().err == (
        f"outrider: the page cannot be written to {target} (No such file or directory); "
        "name another file by --output\n"
    )


def test_a_closed_stdout_is_no_failure(tiny):
    command = f'"{sys.executable}" -m flows.cli status --store "{tiny.store}" >&-'

    done = subprocess.run(
        command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
