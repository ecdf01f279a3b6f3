"""Add a result of any machine to docs/data/evidence/: `python -m scripts.add_result FOLDER MODEL-TEXTS-MACHINE`.

FOLDER is the output of `hf-posenc bench --suite evidence`, `perplexity` or `retrieval`. `python -m scripts.make_readme`
then makes its tables.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from scripts import results

NAME = re.compile(r"[a-z0-9._]+-[a-z0-9]+-[a-z0-9_]+")
KINDS = ("bench", "perplexity", "retrieval")


def main(folder: str, name: str) -> None:
    """Copy the result of a folder under a name."""
    if not NAME.fullmatch(name):
        sys.exit(f"{name} is no MODEL-TEXTS-MACHINE: give three words, such as smollm2-books-h100.")
    found = [file for kind in KINDS if (file := Path(folder, f"{kind}.json")).is_file()]
    if not found:
        sys.exit(
            f"{folder} has no result: run its command again, with the methods that it finished."
        )
    shutil.copyfile(found[0], results.DATA / "evidence" / f"{name}.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
