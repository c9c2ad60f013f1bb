"""Write the table of verifier families into README.md: python -m tests.families.readme"""

from pathlib import Path

from tests.families.table import FAMILIES, REFUSED

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- families: written by make docs -->\n", "<!-- families: end -->\n"


def table() -> str:
    """Return the table in Markdown: families that work first, then those that are refused."""
    lines = ["| family | for example | weights under | what sets it apart | works |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {family.name} | {family.examples} | {family.weights} | {family.special} | yes |"
        for family in FAMILIES
    ]
    lines += [
        f"| {family.name} | {family.examples} | | {family.why} | refused |" for family in REFUSED
    ]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return the README's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
