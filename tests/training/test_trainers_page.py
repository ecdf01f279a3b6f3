"""docs/trainers.md: its lines for TRL run, on shorter texts, and its callback patches a model in time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_posenc import from_pretrained, get_patch
from hf_posenc.embedded import model_path

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.slow
def test_the_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCKS[0].replace("max_length=512", "max_length=64"), names)
    assert "rerope" in capsys.readouterr().out
    assert names["trainer"].state.global_step == 2
    exec(BLOCKS[1], names)
    trainer = names["SFTTrainer"](
        model=from_pretrained(model_path()),
        args=names["SFTConfig"]("hooked", use_cpu=True, bf16=False, **names["settings"]),
        train_dataset=names["trainer"].train_dataset,
        processing_class=names["trainer"].processing_class,
        callbacks=[names["Patch"]()],
    )
    assert trainer.optimizer is None
    trainer.train()
    trainer.save_model("hooked/final")
    found = get_patch(from_pretrained("hooked/final"))
    assert found is not None
    assert "yarn" in str(found)


def test_the_version_of_trl_is_the_pinned_one() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^trl==(.*)$", constraints, re.MULTILINE)
    assert f"(TRL {version})" in PAGE
