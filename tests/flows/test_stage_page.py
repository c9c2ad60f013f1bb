"""What Prefect's UI shows of the data and of a stage: epochs of a training, acceptance, the draft before."""

import pyarrow.parquet as pq

from flows.stage_page import SHOWN_EPOCHS, comparison, describe_data, describe_stage, epoch_table
from storage import artifacts
from storage.store import Store
from tasks.data_summary import DataSummary
from tasks.stage import StageResult
from tasks.training_history import Epoch, Quality
from tests.tiny_runs import TinyRun


def page(tiny: TinyRun, stage: str) -> list[str]:
    store = Store(str(tiny.store))
    entry = tiny.result["stages"][stage]
    parts = tuple(artifacts.peek(store, path) for path in entry["parts"])
    return describe_stage(store, stage, entry, StageResult(parts, reused=False)).splitlines()


def test_a_training_shows_loss_accuracies_and_acceptance_length_of_each_epoch(
    tiny: TinyRun,
) -> None:
    lines = page(tiny, "train")

    for about in ("Loss", "Accuracy by drafted token"):
        assert any(line.startswith(f"![{about}](data:image/svg+xml") for line in lines)
    (metrics,) = tiny.store.glob("checkpoints/*/attempt-*/metrics.parquet")
    rows = pq.read_table(metrics).to_pylist()
    header = "| epoch | steps | lr | tokens/s | side | loss | acceptance length | token 1 | token 2 | token 3 |"
    at = lines.index(header)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[at + 2 : at + 6]]
    assert [row[0] for row in table] == ["1", "", "2", ""]
    assert [row[4] for row in table] == ["train", "validation"] * 2
    last = rows[-1]
    assert last["validation"]
    names = ("loss", "acceptance_length", "full_acc_0", "full_acc_1", "full_acc_2")
    assert table[3][5:] == [f"{last[name]:.3f}" for name in names]
    steps = [row for row in rows if row["epoch"] == 1 and not row["validation"]]
    assert table[2][1] == str(steps[-1]["step"])
    assert table[2][5] == f"{sum(row['loss'] for row in steps) / len(steps):.3f}"


def test_an_evaluation_shows_the_acceptance_of_each_drafted_token_before_and_after(
    tiny: TinyRun,
) -> None:
    lines = page(tiny, "evaluate")

    store, parts = Store(str(tiny.store)), tiny.result["stages"]["evaluate"]["parts"]
    _, before, after = (artifacts.peek(store, path).facts for path in parts)
    for i in range(3):
        b, a = before["per_position"][i], after["per_position"][i]
        assert f"| {i + 1} | {b:.3f} | {a:.3f} |" in lines
    assert f"| acceptance length | {before['acceptance_length']:.2f} |" in "\n".join(lines)


def test_a_draft_is_shown_beside_the_one_in_service() -> None:
    decision = {
        "draft": "m", "promoted": True, "gain": 0.2, "interval": [0.1, 0.3], "confidence": 0.9,
        "acceptance_length": 1.7, "before": 1.5, "sources": {"a|b": [1.7, 1.5]},
        "per_position": [[0.5, 0.2], [0.4, 0.1]],
    }  # fmt: skip

    lines = comparison(decision, in_service=True)

    assert lines[0].startswith("in service as m: +0.200")
    assert lines[2].startswith("![Acceptance by position](data:")
    assert "| all prompts | 1.700 | 1.500 |" in lines
    assert "| a&#124;b | 1.700 | 1.500 |" in lines
    first = comparison(
        decision | {"gain": None, "before": None, "per_position": [[0.5], None]}, in_service=True
    )
    assert "| all prompts | 1.700 | - |" in first
    assert not any("data:" in line for line in first)


def test_a_sample_with_fences_of_its_own_stays_one_block() -> None:
    data = DataSummary({"samples": "1"}, {}, None, {"train": 0.5}, None, ("⟦```py\nx\n```⟧",))

    lines = describe_data(data).splitlines()

    assert "| train | 50.00% |" in lines
    start = lines.index("````text")
    assert lines[start + 1 : start + 5] == ["⟦```py", "x", "```⟧", "````"]


def test_of_many_epochs_the_last_ones_are_shown() -> None:
    quality = Quality(loss=None, acceptance_length=1.5, accuracies=(0.5,))
    epochs = [Epoch(n, n, 1e-3, None, quality, None) for n in range(1, SHOWN_EPOCHS + 6)]

    lines = epoch_table(epochs)

    assert lines[2] == "| 6 | 6 | 1.00e-03 | - | train | - | 1.500 | 0.500 |"
    assert len([line for line in lines if "| train |" in line]) == SHOWN_EPOCHS
    assert lines[-2].startswith("The first 5 epochs are left out. ")
