"""The table of cases names tests that exist, each case once and in order."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (TESTS / "cases/README.md").read_text("utf-8").splitlines()
    if re.match(r"\| [A-J]\d", line)
]


def test_every_case_stands_once_and_in_order():
    ids = [(row[0][0], int(row[0][1:])) for row in ROWS]
    assert ids == sorted(set(ids))
    assert {letter for letter, _ in ids} == set("ABCDEFGHIJ")
    assert all(len(row) == 4 and row[1] and row[2] for row in ROWS)


def test_every_test_that_it_names_exists():
    named = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2])]
    missing = []
    for name in named:
        path, _, function = name.partition("::")
        file = TESTS / path
        text = file.read_text("utf-8") if file.is_file() else ""
        if not re.search(rf"^def {function}\(" if function else "^def test_", text, re.MULTILINE):
            missing.append(name)
    assert len(named) > len(ROWS)
    assert missing == []


def test_every_test_of_a_case_is_in_the_table():
    """A test in this folder is named after its case: it must stand in that case's row."""
    cells = {row[0].lower(): row[2] for row in ROWS}
    for file in sorted((TESTS / "cases").glob("test_?_*.py")):
        for case, name in re.findall(
            r"^def (test_([a-j]\d+)_\w+)\(", file.read_text(), re.MULTILINE
        ):
            assert f"`cases/{file.name}::{case}`" in cells[name], case
