"""Amounts of bytes as people write them, in powers of 1000."""

import re

UNITS = ("B", "KB", "MB", "GB", "TB")

_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})?", re.IGNORECASE)


def show_bytes(count: float) -> str:
    """Return an amount with one decimal and its unit: 1500 -> "1.5 KB"."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} {UNITS[-1]}"


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as "50GB" or "1.5 tb" means; ValueError for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no amount of bytes; write it as 500MB, 50GB or 1.5TB")
    unit = 1000 ** UNITS.index((match[2] or "B").upper())
    return int(float(match[1]) * unit)
