"""TensorBoard's event files, read by TensorBoard."""

from pathlib import Path


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of all event files of a run, what was purged left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
