"""What Prefect's UI shows of a stage: the epochs of a training, the acceptance of an evaluation."""

import pyarrow.parquet as pq

from flows.stage_page import SHOWN_EPOCHS, describe_stage, epoch_table
from storage import artifacts
from storage.store import Store
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


def test_of_many_epochs_the_last_ones_are_shown() -> None:
    quality = Quality(loss=None, acceptance_length=1.5, accuracies=(0.5,))
    epochs = [Epoch(n, n, 1e-3, None, quality, None) for n in range(1, SHOWN_EPOCHS + 6)]

    lines = epoch_table(epochs)

    assert lines[2] == "| 6 | 6 | 1.00e-03 | - | train | - | 1.500 | 0.500 |"
    assert len([line for line in lines if "| train |" in line]) == SHOWN_EPOCHS
    assert lines[-2].startswith("The first 5 epochs are left out. ")
