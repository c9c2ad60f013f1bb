"""Write RESULTS.md, the table of results.jsonl: `python tests/benchmarks/table.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = (
    "date",
    "device",
    "benchmark",
    "unit",
    "ours",
    "peer",
    "ratio",
    "ceiling",
    "more",
    "command",
)
SHOWN = {*COLUMNS, "versions", "peer_name"}


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    lines = [
        "# Results",
        "",
        "Made from results.jsonl by `python tests/benchmarks/table.py`. A ratio above 1 means that ours is faster;",
        "ceiling is what the machine gave in the same run (GFLOP/s of plain matrix products), or the limit allowed.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        more = {key: value for key, value in row.items() if key not in SHOWN}
        peer = f"{row['peer']} ({row['peer_name']})" if row.get("peer_name") else row["peer"]
        cells = {
            **row,
            "date": row["date"][:10],
            "peer": "-" if peer is None else peer,
            "ratio": row["ratio"] or "-",
            "more": ", ".join(f"{key}: {value}" for key, value in more.items()),
            "command": f"`{row['command']}`",
        }
        lines.append("| " + " | ".join(str(cells[c]).replace("|", "/") for c in COLUMNS) + " |")
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
