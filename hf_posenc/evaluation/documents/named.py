"""Documents by name: `books`, `code` and `prose`, chosen by fixed rules, so that everyone gets the same ones.

- `books`: every book of the package that `hf-posenc fetch books` downloads. Language models have read them.
- `code`: folders of models in the installed transformers whose modeling files are copyright `NEW` or later. A folder is
  one document: its files, one after the other, but for `modular_*.py`, which repeat others. It is left out if more than
  `SHARED` of its lines are in folders of older models, or in longer documents.
- `prose`: the documentation in the packages that `hf-posenc fetch prose` downloads, a document for each folder.

Code and prose have `LEAST` characters or more. The name of a document has the version of its package.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_posenc import catalog
from hf_posenc.embedded.corpus import distinctive_lines
from hf_posenc.evaluation.documents.document import Document

NEW = "2025"
SHARED = 0.6
LEAST = 60_000
"""Some 16,000 tokens."""
_YEAR = re.compile(r"Copyright\D*(\d{4})")
_PAGES = {
    "books": re.compile(r"package/gutenberg/(.*\.txt)"),
    "prose": re.compile(r"package/(docs(?:/[^/]+(?=/))?).*\.mdx?"),
}
"""Files of a package; those of one name, in parentheses, are one document."""


@functools.cache
def code() -> tuple[Document, ...]:
    """Return the code, the longest document first."""
    import transformers

    new, known = dict[str, str](), set[bytes]()
    for folder in sorted(Path(transformers.__file__).parent.glob("models/*/")):
        texts = {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*.py"))}
        text = "".join(x for name, x in texts.items() if not name.startswith(("modular_", "__")))
        heads = [x[:2000] for name, x in texts.items() if name.startswith("modeling_")]
        years = [min(_YEAR.findall(head), default="") for head in heads]
        if years and min(years) >= NEW:
            new[folder.name] = text
        else:
            known |= distinctive_lines(text)
    documents = []
    for name in sorted(new, key=lambda name: (-len(new[name]), name)):
        lines = distinctive_lines(new[name])
        if len(new[name]) >= LEAST and len(lines & known) <= SHARED * len(lines):
            known |= lines
            title = f"transformers=={transformers.__version__}/{name}"
            documents.append(Document(title, new[name]))
    return tuple(documents)


def fetched(name: str) -> Iterator[Document]:
    """Yield the books, or the folders of prose; files that are not UTF-8 are Latin-1."""
    texts: dict[str, str] = {}
    for package, path, content in catalog.contents(name):
        if match := _PAGES[name].fullmatch(path):
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = content.decode("latin-1")
            title = f"{package}/{match[1]}"
            texts[title] = texts.get(title, "") + text
    least = LEAST if name == "prose" else 0
    return (Document(title, text) for title, text in texts.items() if len(text) >= least)


NAMED: dict[str, Callable[[], Iterator[Document]]] = {
    "books": functools.partial(fetched, "books"),
    "code": lambda: iter(code()),
    "prose": functools.partial(fetched, "prose"),
}
"""The documents of each name."""


def is_name(argument: str) -> bool:
    """Return whether an argument names documents, and no file or folder."""
    return argument in NAMED and not os.path.lexists(argument)
