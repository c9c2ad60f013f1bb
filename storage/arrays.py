"""Named numpy arrays as one safetensors file, read and written without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays of numbers or booleans by name."""
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


def read_arrays(path: Path) -> dict[str, Array]:
    """Read all arrays of a file.

    Raises:
        ValueError: it is no complete safetensors file.
    """
    try:
        arrays: dict[str, Array] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}") from error
    return arrays
