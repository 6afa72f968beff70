"""The table of behaviours names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "behaviours.md"


def test_every_pinning_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text())
    assert len(named) > 20
    for file, test in named:
        assert re.search(rf"def {test}\(", (TESTS / file).read_text()), f"{file}::{test}"


def test_every_row_is_pinned() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| D")]
    assert all(".py::" in row for row in rows)
