"""OPERATE.md names for each fault the tests that hold it: they exist."""

import re

import pytest

from tests.tiny_runs import ROOT

PAGE = (ROOT / "OPERATE.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text()


def test_every_fault_has_what_to_do_and_a_test() -> None:
    table = PAGE.split("## Faults", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 25
    for fault, _, to_do, tests in rows:
        assert to_do.strip(), fault
        assert re.search(r"`[\w/]+\.py::test_\w+`", tests), fault
