"""The final save: the old result or the new one, never a mixture that loads."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.files import write_atomically
from hf_posenc.training.checkpoints import save_result
from tests.support.file_operations import Moment
from tests.support.killing import launch

NAMES = ("config.json", "model.safetensors", "tokenizer.json")


def _result(folder: Path, moment: Moment | None, *, text: str = "new") -> None:
    def write(path: str) -> None:
        for name in NAMES:
            (Path(path) / name).write_text(text)

    save_result(folder, write)


@pytest.mark.slow
def test_a_kill_in_the_final_save_never_leaves_a_mixture_that_loads(tmp_path: Path) -> None:
    assert launch(tmp_path / "whole", work=_result, log=tmp_path / "operations") == [0]
    count = len((tmp_path / "operations").read_text().splitlines())
    seen = set()
    for operation in range(1, count + 1):
        folder = tmp_path / str(operation)
        folder.mkdir()
        (folder / "config.json").write_text("old")
        for shard in (1, 2):
            (folder / f"model-0000{shard}-of-00002.safetensors").write_text("old")
        (folder / "model.safetensors.index.json").write_text("old")
        assert launch(folder, Moment(operation), work=_result) == [-signal.SIGKILL]
        texts = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        if "config.json" in texts:
            assert len(set(texts.values())) == 1, (operation, texts)
            assert len(texts) == (4 if texts["config.json"] == "old" else 3)
        seen.add(texts.get("config.json"))
        if operation % 5 == 0:
            _result(folder, None)
            assert sorted(path.name for path in folder.iterdir()) == [*NAMES]
    assert seen == {"old", None, "new"}


def test_a_final_save_that_fails_leaves_the_old_result_and_says_so(tmp_path: Path) -> None:
    _result(tmp_path, None, text="old")

    def full(path: str) -> None:
        (Path(path) / "config.json").write_text("new")
        raise OSError(28, "No space left on device")

    def of_ours(path: str) -> None:
        write_atomically(Path(path) / "nothing" / "card.md", "new")

    for write, reason in ((full, "No space left"), (of_ours, "card.md cannot be written")):
        message = f"could not be saved.*{reason}.*make room and run the same command"
        with pytest.raises(PosencError, match=message):
            save_result(tmp_path, write)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old"}
