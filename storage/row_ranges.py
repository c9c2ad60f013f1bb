"""Rows of a table as half-open ranges, and how they print."""

import re
from dataclasses import dataclass

_NAME = re.compile(r"rows-(\d{9,})-(\d{9,})")


@dataclass(frozen=True, order=True)
class RowRange:
    """Rows start, start + 1, ..., stop - 1.

    Raises:
        ValueError: start is negative or stop is before start.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"a row range needs 0 <= start <= stop, not start {self.start} and stop {self.stop}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"rows [{self.start}, {self.stop})"

    @property
    def name(self) -> str:
        """A file-name form that sorts by start: "rows-000000000-000001024"."""
        return f"rows-{self.start:09d}-{self.stop:09d}"

    @classmethod
    def parse(cls, name: str) -> "RowRange":
        """The range of a `name`; ValueError for any other text."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name!r} is not the name of a row range such as {cls(0, 1024).name!r}"
            )
        return cls(int(match[1]), int(match[2]))


def split(rows: int, rows_per_shard: int) -> list[RowRange]:
    """Ranges that cover [0, rows) in order, of `rows_per_shard` rows but for a shorter last one.

    Raises:
        ValueError: `rows` is negative or `rows_per_shard` is not positive.
    """
    if rows < 0 or rows_per_shard < 1:
        raise ValueError(
            f"cannot split {rows} rows by {rows_per_shard}: rows must be >= 0, rows_per_shard >= 1"
        )
    return [
        RowRange(start, min(start + rows_per_shard, rows))
        for start in range(0, rows, rows_per_shard)
    ]
