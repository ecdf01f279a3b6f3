"""Every room has a budget of files and lines: the table in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([\d,]+|-) \| ([\d,]+) \|", re.MULTILINE)
"""Rooms, files and lines; `-`: any number of files."""


def _budgets() -> dict[str, tuple[float, int]]:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("## Budgets\n")[2].partition("\n## ")[0]
    rows = ROW.findall(table.replace("\\", ""))
    numbers = {
        rooms: (files.replace(",", ""), lines.replace(",", "")) for rooms, files, lines in rows
    }
    return {rooms: (float(f if f != "-" else "inf"), int(n)) for rooms, (f, n) in numbers.items()}


BUDGETS = _budgets()


def files_of(rooms: str) -> set[Path]:
    """The Python files of the paths between backticks: a folder, or files by a pattern."""
    files: set[Path] = set()
    for room in re.findall("`([^`]+)`", rooms):
        found = set(ROOT.glob(f"{room}**/*.py" if room.endswith("/") else room))
        assert found, f"{room} in the table of CONTRIBUTING.md does not exist"
        files |= found
    return files


@pytest.mark.parametrize("rooms", BUDGETS)
def test_a_room_is_within_its_budget(rooms: str) -> None:
    most_files, most_lines = BUDGETS[rooms]
    files = files_of(rooms)
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    over = [
        f"{rooms} has {number:,} {unit}, its budget is {most:,.0f}: make room, or give a reason in the table"
        for number, most, unit in ((len(files), most_files, "files"), (lines, most_lines, "lines"))
        if number > most
    ]
    assert not over, "; ".join(over)


def test_every_file_of_the_package_has_a_room() -> None:
    parts = [
        files_of(rooms)
        for rooms in BUDGETS
        if rooms.startswith("`hf_posenc/") and rooms != "`hf_posenc/`"
    ]
    everything = files_of("`hf_posenc/`")
    assert set().union(*parts) == everything
    assert sum(map(len, parts)) == len(everything), "a file counts in two rooms"
