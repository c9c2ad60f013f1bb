import pytest

from storage import layout


def test_paths_are_made_and_steps_read_back() -> None:
    assert layout.shard_directory("c1", "s2") == "states/c1/s2"
    path = layout.checkpoint_directory("t1", 120)
    assert path == "checkpoints/t1/steps/step-000000120"
    assert layout.parse_step(path.rsplit("/", 1)[-1]) == 120
    assert layout.run_record("brisk-otter") == "run_records/brisk-otter.json"
    assert (
        layout.draft_pointer("moonshotai/Kimi K2.5") == "drafts/moonshotai-Kimi-K2.5/current.json"
    )


def test_a_step_of_ten_digits_sorts_and_reads() -> None:
    assert layout.parse_step("step-1234567890") == 1_234_567_890


@pytest.mark.parametrize("name", ["step-12", "step-000000120.tmp", "latest", ""])
def test_other_directories_are_no_checkpoints(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        layout.parse_step(name)


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden"])
def test_a_key_that_is_no_plain_name_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="cannot be part of a path"):
        layout.capture_directory(key)
