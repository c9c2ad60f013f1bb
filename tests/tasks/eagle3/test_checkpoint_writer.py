"""Checkpoints behind the compute: the training goes on, the copy does not change, an error stops it."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.eagle3.checkpoint_writer import CheckpointWriter, HostCopies
from tasks.eagle3.training_state import Position, TrainingState
from tests.tasks.eagle3.test_training import make_training

CPU = torch.device("cpu")


def state_of(value: float, *, step: int = 1) -> TrainingState:
    return TrainingState(Position(step=step), {"weights/w": torch.full((3,), value)})


def copies(state: TrainingState) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.tensors.items()}


def test_training_goes_on_while_a_checkpoint_is_written_and_the_checkpoint_stays_as_it_was() -> (
    None
):
    training = make_training(checkpoint_seconds=1e-9)
    at_step: dict[int, dict[str, Tensor]] = {}
    written: list[tuple[int, dict[str, Tensor]]] = []
    at_once, most_at_once, last_step = 0, 0, 0
    goes_on = threading.Event()

    def write(state: TrainingState) -> None:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        if not written:
            assert goes_on.wait(60)  # the first takes as long as five steps
            assert last_step >= state.position.step + 5
        assert len(state.position.history) == state.position.step + state.position.epoch
        written.append((state.position.step, copies(state)))
        at_once -= 1

    def on_step(step: int, *_: Any) -> None:
        nonlocal last_step
        last_step = step
        at_step[step] = copies(training.state())
        if step == 6:
            goes_on.set()

    training.run(on_checkpoint=write, on_step=on_step)

    steps = [step for step, _ in written]
    assert steps[0] == 1
    assert min(steps[1:]) >= 6  # none was begun before the first was written
    assert steps[-1] <= training.total_steps
    assert most_at_once == 1
    for step, tensors in written:
        for name, value in tensors.items():
            if not name.startswith("best/"):
                assert torch.equal(value, at_step[step][name]), f"{name} of step {step}"


def test_an_error_of_the_writer_ends_the_training_with_its_cause() -> None:
    training = make_training(checkpoint_seconds=1e-9, epochs=1000)

    def write(_: TrainingState) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        training.run(on_checkpoint=write, on_step=lambda *_: time.sleep(0.01))
    assert training.position.step < 100


def test_an_error_of_the_last_checkpoint_ends_the_training_too() -> None:
    training = make_training(epochs=2)
    finished = threading.Event()

    def write(_: TrainingState) -> None:
        assert finished.wait(60)
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        training.run(on_checkpoint=write, on_step=lambda *_: None, on_finished=finished.set)


def test_a_finished_training_begins_no_checkpoint_and_tells_the_one_under_way() -> None:
    written: list[int] = []
    finished = threading.Event()

    def write(state: TrainingState) -> None:
        assert finished.wait(60)
        written.append(state.position.step)

    training = make_training(epochs=2)
    training.run(on_checkpoint=write, on_step=lambda *_: None, on_finished=finished.set)
    assert written == [training.total_steps // 2]  # that of the first epoch, complete by now


def test_a_training_that_fails_completes_the_checkpoint_that_is_under_way() -> None:
    written: list[int] = []

    def write(state: TrainingState) -> None:
        time.sleep(0.3)
        written.append(state.position.step)

    def on_step(step: int, *_: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_training(checkpoint_seconds=1e-9).run(on_checkpoint=write, on_step=on_step)
    assert written == [1]


def test_every_checkpoint_is_copied_into_the_same_memory() -> None:
    places: list[int] = []

    def write(state: TrainingState) -> None:
        places.append(state.tensors["weights/w"].data_ptr())

    with CheckpointWriter(write, HostCopies(CPU)) as writer:
        for value in (1.0, 2.0, 3.0):
            assert writer.offer(lambda value=value: state_of(value))  # type: ignore[misc]
            writer.wait()
    assert len(places) == 3
    assert len(set(places)) == 1


def test_an_offer_is_declined_while_a_checkpoint_is_under_way() -> None:
    seen: list[float] = []
    free = threading.Event()

    def write(state: TrainingState) -> None:
        assert free.wait(60)
        seen.append(float(state.tensors["weights/w"][0]))

    with CheckpointWriter(write, HostCopies(CPU)) as writer:
        assert writer.offer(lambda: state_of(1.0))
        assert not writer.offer(lambda: state_of(2.0))
        free.set()
        writer.wait()
        assert writer.offer(lambda: state_of(3.0))
    assert seen == [1.0, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_host_does_not_wait_and_the_copy_is_of_before_the_change() -> None:
    device = torch.device("cuda")
    value = torch.ones(64 << 20, device=device)  # 256 MB
    room = HostCopies(device)
    room.start({"w": value})  # gets the memory
    spin = torch.randn(8192, 8192, device=device)
    value.add_(0)  # CUDA waits for the device where it loads a kernel for the first time
    torch.cuda.synchronize()
    for round_number in (1.0, 2.0):
        for _ in range(40):
            spin = torch.nn.functional.normalize(spin @ spin)  # the device is busy for a while
        started = time.perf_counter()
        taken, copied = room.start({"w": value})
        room.before_change()
        value.add_(1)
        host_seconds = time.perf_counter() - started
        assert not copied.query()
        assert host_seconds < 0.05
        copied.synchronize()
        assert taken["w"].is_pinned()
        assert torch.equal(taken["w"], torch.full_like(taken["w"], round_number))
    assert float(value[0]) == 3.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_is_checkpointed_while_training_goes_on_is_the_state_of_its_step() -> None:
    training = make_training(device="cuda", checkpoint_seconds=1e-9, epochs=10)
    at_step: dict[int, dict[str, Tensor]] = {}
    written: list[tuple[Position, dict[str, Tensor]]] = []

    def on_step(step: int, *_: Any) -> None:
        at_step[step] = copies(training.state())

    training.run(on_checkpoint=lambda s: written.append((s.position, copies(s))), on_step=on_step)

    assert len(written) > 1
    for position, tensors in written:
        assert len(position.history) == position.step + position.epoch  # none is left unread
        for name, value in tensors.items():
            if not name.startswith("best/"):
                assert torch.equal(value, at_step[position.step][name].cpu()), name
