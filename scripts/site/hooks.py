"""Hooks of mkdocs: what the Markdown of docs/ needs beyond mkdocs itself to become the site.

The pages are written for readers of the repository first. At build time the navigation takes in folders of pages, links
out of docs/ become links into the repository, comments go, formulas become MathML, code and pictures fit a narrow
screen, and the marker of a generated page becomes its content.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # an installed package has no scripts/

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402

from scripts.site import links, mathml, navigation, reference  # noqa: E402
from scripts.site.html import readable  # noqa: E402

COPIES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository that are pages of the site too."""
BOOST = {"faq.md": 4.0, "reference/": 0.5, "data/": 0.1}
"""Factors on the scores of pages in the site's search, by the begin of their path. Questions are headings of the first,
as readers type them."""
COLOURS = "hf_posenc/evaluation/page/colours.css"
"""The colours of the report page, which are those of the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns of the navigation; show the menu of versions where mike builds the site."""
    config.nav = navigation.expand(config.nav or [], Path(config.docs_dir))
    if "MIKE_DOCS_VERSION" in os.environ:  # the menu reads a file that only mike writes
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and colours that lie beside docs/."""
    for name in COPIES:
        content = links.from_root((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, name.lower(), content=content))
    files.append(File.generated(config, "assets/colours.css", abs_src_path=str(ROOT / COLOURS)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill what is made from the package, drop comments, and turn links out of docs/ into links into the repository."""
    name = page.file.src_uri
    titles = {file.src_uri: _title(file) for file in files}
    for begin, factor in BOOST.items():
        if name.startswith(begin):
            page.meta["search"] = {"boost": factor}
    page.meta.pop(
        "tags", None
    )  # a model card's, for the hub: a hit in one would outweigh every title a thousandfold
    filled = reference.with_class(reference.filled(markdown), name)
    return links.for_site(filled, name, titles, config.repo_url or "")


@functools.cache
def _title(file: File) -> str:
    """Return the first heading of a page; of other files nothing."""
    if not file.is_documentation_page():
        return ""
    return re.search(r"^# (.*)$|\Z", file.content_string, re.M)[1] or ""  # type: ignore[index]


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Replace formulas by MathML, and make code and pictures fit a narrow screen."""
    return readable(mathml.rendered(html, page.file.src_uri))
