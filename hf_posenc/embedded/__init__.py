"""Embedded model and text: a tiny Llama and long documents that it was not trained on, both offline.

The checkpoint is package data, written by `scripts/train_tiny_llama.py`; its model card is the `README.md` beside it.
The documents are standard-library modules of the running Python, kept out of the training corpus by name and by
content (`hf_posenc.embedded.corpus`). This module imports nothing heavy: no torch, no transformers.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HELD_OUT", "held_out_documents", "held_out_files", "model_path"]

HELD_OUT = (
    "_pydecimal", "typing", "argparse", "tarfile", "inspect", "subprocess", "doctest", "turtle",
    "zipfile", "datetime", "difflib", "mailbox", "ipaddress", "enum", "pickle", "pickletools",
    "pdb", "optparse", "dataclasses", "threading", "shutil", "configparser", "statistics", "pathlib",
)  # fmt: skip
"""Standard-library modules that serve as evaluation documents, in the order in which they are read."""

_MOVED = {"datetime": "_pydatetime"}  # since 3.12 datetime.py only re-exports this one


def model_path() -> Path:
    """Return the folder of the embedded checkpoint: configuration, weights, tokenizer, model card, training log.

    Examples:
        >>> from transformers import AutoConfig
        >>> from hf_posenc.embedded import model_path
        >>> AutoConfig.from_pretrained(model_path()).max_position_embeddings
        256
    """
    return Path(__file__).resolve().parent / "tiny_llama"


def held_out_files(name: str, stdlib: Path | None = None) -> tuple[Path, ...]:
    """Return the source files of one held-out module, sorted: one, all of a package, or none if it is missing.

    A module that is a single file in one Python can be a package in the next (zipfile since 3.12, pathlib since 3.13).
    A module that moved is read under its new name. The modules are read as files and not imported, so that a file of
    the same name in the working directory changes nothing.

    Args:
        name: A name of `HELD_OUT`.
        stdlib: Folder of the standard library; by default the running Python's.
    """
    folder = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    for form in (_MOVED.get(name, name), name):
        if (folder / form).is_dir():
            files = (folder / form).rglob("*.py")
            return tuple(sorted(files, key=lambda file: file.relative_to(folder).as_posix()))
        if (folder / f"{form}.py").is_file():
            return (folder / f"{form}.py",)
    return ()


def held_out_documents(stdlib: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield `(name, text)` of every module of `HELD_OUT` that the user's Python has, in that order.

    A package is the concatenation of its `.py` files in sorted order. Turtle is missing from some builds.

    Args:
        stdlib: Folder of the standard library; by default the running Python's.

    Examples:
        >>> from hf_posenc.embedded import held_out_documents
        >>> documents = dict(held_out_documents())
        >>> len(documents["argparse"]) > 10_000
        True
    """
    for name in HELD_OUT:
        files = held_out_files(name, stdlib)
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        if text:
            yield name, text
