"""The quickstart notebook runs as it is; `python -m tests.test_notebook` runs it and keeps its outputs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"
SECONDS = 300  # for one cell, on a machine that does other things too


def executed(folder: Path) -> Any:
    """The notebook after a run in a new process."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    places = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=places
    )
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": found})
    return notebook


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _kinds(cell: Any) -> list[str]:
    """Outputs of a cell: the name of a stream, or the type that a notebook displays."""
    kinds = []
    for output in cell["outputs"]:
        shown = ("image/png", "text/html", "text/plain")
        data = output.get("data", {})
        kinds.append(output.get("name") or next((name for name in shown if name in data), "error"))
    return [kind for kind, _ in itertools.groupby(kinds)]  # one stream may come in several parts


@pytest.mark.slow
def test_it_runs_without_an_error_and_shows_what_the_committed_one_shows(tmp_path: Path) -> None:
    nbformat, _ = pytest.importorskip("nbformat"), pytest.importorskip("matplotlib")
    made = _code(executed(tmp_path))
    kept = _code(nbformat.read(NOTEBOOK, as_version=4))
    assert [_kinds(cell) for cell in made] == [_kinds(cell) for cell in kept]
    kinds = [kind for cell in made for kind in _kinds(cell)]
    assert kinds.count("image/png") == 3
    assert kinds.count("text/html") == 1
    assert not {"stderr", "error"} & set(kinds)


def test_the_committed_outputs_are_of_a_whole_run_and_of_no_machine() -> None:
    nbformat = pytest.importorskip("nbformat")
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = _code(nbformat.reads(text, as_version=4))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells[3:])  # behind installing and importing
    assert len(text) < 400_000
    for place in ("/home/", "/root/", "/tmp/", "/work/", "site-packages", "://localhost"):
        assert place not in text


if __name__ == "__main__":
    import tempfile

    import nbformat

    with tempfile.TemporaryDirectory() as empty:
        run = executed(Path(empty))
    for cell in run["cells"]:
        cell["metadata"] = {}  # the times of execution
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                output["data"].pop(
                    "text/plain", None
                )  # the same once more, with the folder of the model
    text: str = nbformat.writes(run)  # type: ignore[no-untyped-call]
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
