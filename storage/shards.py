"""Captured states in files: many samples' rows in a row, and a table that says whose they are.

T = tokens of the shard, N = samples, A = captured layers, H = verifier hidden size.

"states.safetensors" holds `aux` [T, A * H] (layers in ascending order, side by side) and `last`
[T, H] (before the final norm), encoded by a codec (fp8 adds `aux.scale` [T, A] and `last.scale`
[T, 1]). "rows.parquet" holds for each sample its id, its
rows [start, stop) and its token ids.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from storage.artifacts import open_file
from storage.codecs import codec_named
from storage.layout import ROWS_TABLE, STATES_FILE
from storage.manifest import Manifest, canonical_digest, canonical_json
from storage.store import Store, StoreError
from storage.tables import Offsets, Ragged, Values, list_column, ragged, read_table, write_table
from storage.writing import Writer

if TYPE_CHECKING:  # torch takes seconds to import and most readers of a store need none
    import torch

FORMAT_VERSION = 1
FINAL_STATE = "pre_norm"
"""`last` is the input of the final norm: who computes logits from it applies that norm once."""

METADATA_KEY = "outrider"
"""One entry holds all metadata: safetensors writes several in random order (seen in 0.8), and equal
shards must have equal bytes."""

ROWS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
    ]
)


class NonFiniteStatesError(ValueError):
    """Captured states hold NaN or infinity. `sample_indices` says in which samples of the shard."""

    def __init__(self, message: str, sample_indices: list[int]) -> None:
        super().__init__(message)
        self.sample_indices = sample_indices


@dataclass(frozen=True)
class ShardRows:
    """Which rows of a shard belong to which sample.

    Raises:
        ValueError: not as many ids as samples, or the rows do not follow each other from 0.
    """

    sample_ids: tuple[str, ...]
    """[N]"""
    tokens: Ragged
    """Token ids of each sample; its offsets [N + 1] are those of the states' rows."""

    def __post_init__(self) -> None:
        offsets = self.tokens.offsets
        if len(offsets) != len(self.sample_ids) + 1:
            raise ValueError(
                f"{len(self.sample_ids)} sample ids for {len(offsets) - 1} token lists"
            )
        if (
            offsets[0] != 0
            or offsets[-1] != len(self.tokens.values)
            or (np.diff(offsets) < 0).any()
        ):
            raise ValueError(
                f"the samples' rows must follow each other from 0 to {len(self.tokens.values)}"
            )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def offsets(self) -> Offsets:
        """Sample i has the rows [offsets[i], offsets[i + 1])."""
        return self.tokens.offsets

    @property
    def token_count(self) -> int:
        """Rows of the shard, T."""
        return int(self.tokens.offsets[-1])

    @classmethod
    def from_lists(
        cls, sample_ids: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "ShardRows":
        """Rows of samples given as lists of token ids."""
        offsets = np.cumsum([0, *map(len, token_ids)], dtype=np.int64)
        values: Values = np.fromiter(
            (i for ids in token_ids for i in ids), np.int32, int(offsets[-1])
        )
        return cls(tuple(sample_ids), Ragged(values, offsets))


def check_shapes(aux: "torch.Tensor", last: "torch.Tensor", rows: ShardRows) -> None:
    """Check the shapes of states [T, A * H] and [T, H] against the samples they belong to.

    Raises:
        ValueError: the row counts differ, or the width of `aux` is no multiple of that of `last`.
    """
    if not aux.ndim == last.ndim == 2 or not len(aux) == len(last) == rows.token_count:
        raise ValueError(
            f"states of {rows.token_count} tokens need as many rows: aux is {list(aux.shape)}, "
            f"last is {list(last.shape)}"
        )
    if last.shape[1] == 0 or aux.shape[1] % last.shape[1]:
        raise ValueError(
            f"aux holds whole layers side by side, but its width {aux.shape[1]} is no multiple "
            f"of the hidden size {last.shape[1]}"
        )


def is_finite(states: "torch.Tensor") -> bool:
    """Whether states hold numbers alone.

    One pass at the speed of memory: the extremes carry any NaN or infinity there is.
    """
    if states.numel() == 0:
        return True
    low, high = states.aminmax()
    return bool(low.isfinite() and high.isfinite())


def check_finite(aux: "torch.Tensor", last: "torch.Tensor", rows: ShardRows) -> None:
    """Check that states [T, A * H] and [T, H] hold numbers.

    Raises:
        NonFiniteStatesError: a value is NaN or infinite; the samples are named.
    """
    import torch  # noqa: PLC0415 - see above

    wrong: dict[int, str] = {}
    for name, states in (("aux", aux), ("last", last)):
        if is_finite(states):
            continue
        finite_rows = torch.cat([part.isfinite().all(dim=1) for part in torch.split(states, 1024)])
        bad_rows = (~finite_rows).nonzero().flatten().numpy()
        for index in np.unique(np.searchsorted(rows.offsets, bad_rows, side="right") - 1):
            wrong.setdefault(int(index), name)
    if wrong:
        first, name = min(wrong.items())
        raise NonFiniteStatesError(
            f"{len(wrong)} of {len(rows)} samples have states that are NaN or infinite, the first "
            f"is {rows.sample_ids[first]} (in {name}); leave them out or capture in a wider dtype",
            sorted(wrong),
        )


def write_shard(
    writer: Writer,
    *,
    aux: "torch.Tensor",
    last: "torch.Tensor",
    rows: ShardRows,
    layer_ids: Sequence[int],
    codec: str = "bf16",
) -> None:
    """Check, encode and store the states of a shard; publishing the artifact is left to the caller.

    Args:
        writer: of the shard's artifact.
        aux: captured layers, [T, A * H] on the CPU.
        last: input of the final norm, [T, H] on the CPU.
        rows: the samples.
        layer_ids: the A captured layers, ascending.
        codec: how values are stored, "bf16" or "fp8".

    Raises:
        ValueError: shapes, layers or the codec do not fit.
        NonFiniteStatesError: a value is not finite, or not after encoding.
    """
    layers = [int(layer) for layer in layer_ids]
    if layers != sorted(set(layers)):
        raise ValueError(f"layer ids must ascend without repetition, not {layers}")
    encoding = codec_named(codec)
    check_shapes(aux, last, rows)
    hidden_size = last.shape[1]
    if aux.shape[1] != len(layers) * hidden_size:
        raise ValueError(
            f"{len(layers)} layers of hidden size {hidden_size} need an aux of width "
            f"{len(layers) * hidden_size}, not {aux.shape[1]}"
        )
    tensors = {
        **encoding.encode("aux", aux, hidden_size=hidden_size),
        **encoding.encode("last", last, hidden_size=hidden_size),
    }
    check_finite(encoding.decode("aux", tensors), encoding.decode("last", tensors), rows)
    metadata = {
        "format_version": FORMAT_VERSION,
        "final_state": FINAL_STATE,
        "codec": codec,
        "layer_ids": layers,
        "hidden_size": hidden_size,
    }
    writer.add_tensors(STATES_FILE, tensors, metadata={METADATA_KEY: canonical_json(metadata)})
    with writer.file(ROWS_TABLE) as path:
        columns = {
            "sample_id": list(rows.sample_ids),
            "start": rows.offsets[:-1],
            "stop": rows.offsets[1:],
            "input_ids": list_column(rows.tokens, pa.int32()),
        }
        write_table(path, columns, schema=ROWS_SCHEMA)


class ShardReader:
    """States of one shard, memory-mapped: only the rows that are asked for are read.

    Args:
        states_path: the shard's "states.safetensors" on this machine.
        rows_path: the shard's "rows.parquet" on this machine.

    Raises:
        ValueError: no shard of a known format, or its parts do not fit each other.
    """

    def __init__(self, states_path: Path, rows_path: Path) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - see above

        self.rows = _read_rows(rows_path)
        try:
            file: Any = safe_open(states_path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{states_path} is no complete safetensors file: {error}") from error
        names = file.keys()
        self._slices: dict[str, Any] = {name: file.get_slice(name) for name in names}
        metadata = _read_metadata(file.metadata(), states_path)
        self._codec = codec_named(metadata["codec"])
        self.codec: str = metadata["codec"]
        self.layer_ids: tuple[int, ...] = tuple(metadata["layer_ids"])
        self.hidden_size: int = metadata["hidden_size"]
        for name, states in (("aux", len(self.layer_ids)), ("last", 1)):
            width = states * self.hidden_size
            for part, columns in self._codec.widths(name, width, self.hidden_size).items():
                self._check_shape(part, [self.rows.token_count, columns], states_path)

    def aux(self, start: int, stop: int) -> "torch.Tensor":
        """Captured layers of the rows [start, stop), [stop - start, A * H]."""
        return self._decoded("aux", start, stop)

    def last(self, start: int, stop: int) -> "torch.Tensor":
        """Input of the final norm of the rows [start, stop), [stop - start, H]."""
        return self._decoded("last", start, stop)

    def _decoded(self, name: str, start: int, stop: int) -> "torch.Tensor":
        if not 0 <= start <= stop <= self.rows.token_count:
            raise ValueError(f"rows [{start}, {stop}) are not in [0, {self.rows.token_count})")
        parts = {
            key: piece[start:stop] for key, piece in self._slices.items() if _belongs(key, name)
        }
        return self._codec.decode(name, parts)

    def _check_shape(self, name: str, wanted: list[int], path: Path) -> None:
        found = self._slices[name].get_shape() if name in self._slices else None
        if found != wanted:
            raise ValueError(
                f"{path}: {name} has the shape {found}, its rows and layers need {wanted}"
            )


@contextmanager
def open_shard(store: Store, manifest: Manifest) -> Iterator[ShardReader]:
    """The reader of one captured shard, for the length of the block.

    Fetched first from an object store.
    """
    with ExitStack() as stack:
        states = stack.enter_context(open_file(store, manifest, STATES_FILE))
        rows = stack.enter_context(open_file(store, manifest, ROWS_TABLE))
        yield ShardReader(states, rows)


def read_sample_ids(store: Store, shard: Manifest) -> pa.ChunkedArray:
    """Ids of a captured shard's samples, in order. Only their column is read, and held against the shard's inputs.

    Raises:
        ArtifactError: they are others, and so is the file's digest: the shard is set aside.
    """

    def read(file: Path | BinaryIO) -> pa.ChunkedArray:
        return read_table(file, columns=["sample_id"]).column("sample_id")

    try:
        ids = store.read_parts(f"{shard.path}/{shard.files[ROWS_TABLE].path}", read)
        if canonical_digest(ids.to_pylist()) == shard.inputs.get("samples"):
            return ids
    except (StoreError, FileNotFoundError, ValueError):
        pass  # what is wrong with the file, the next lines say
    with open_file(store, shard, ROWS_TABLE) as path:
        return read(path)


def _belongs(key: str, name: str) -> bool:
    """Whether a stored tensor is (a part of) the states `name`: "aux", "aux.scale"."""
    return key == name or key.startswith(f"{name}.")


def _read_rows(path: Path) -> ShardRows:
    table = read_table(path, ROWS_SCHEMA.names)
    rows = ShardRows(tuple(table["sample_id"].to_pylist()), ragged(table["input_ids"]))
    starts, stops = table["start"].to_numpy(), table["stop"].to_numpy()
    if not (np.array_equal(starts, rows.offsets[:-1]) and np.array_equal(stops, rows.offsets[1:])):
        raise ValueError(
            f"{path}: start and stop of the samples do not follow from their token ids"
        )
    return rows


def _read_metadata(entries: dict[str, str] | None, path: Path) -> dict[str, Any]:
    if not entries or METADATA_KEY not in entries:
        raise ValueError(f"{path} holds no captured states: it lacks the {METADATA_KEY!r} metadata")
    metadata: dict[str, Any] = json.loads(entries[METADATA_KEY])
    found = metadata.get("format_version"), metadata.get("final_state")
    if found != (FORMAT_VERSION, FINAL_STATE):
        raise ValueError(
            f"{path} has format version and final state {found}, this code reads "
            f"{(FORMAT_VERSION, FINAL_STATE)}; capture it again"
        )
    return metadata
