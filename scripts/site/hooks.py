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

from scripts.site import links, mathml, navigation, notebook, reference  # noqa: E402

COPIES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository that are pages of the site too."""
BOOST = {"faq.md": 4.0, "choosing.md": 3.0, "errors.md": 2.5, "lm_eval.md": 2.0}
BOOST |= {"reference/": 0.5, "changelog.md": 0.2, "data/": 0.1}
"""Factors on the scores of pages in the site's search, by the begin of their path. Questions are headings of the first,
as readers type them."""
SHORT = 30
"""Characters of inline code that stays on one line; of longer code, every option does."""
NARROW = re.compile(
    r"<pre.*?</pre>|<svg.*?</svg>|<a [^>]*>\s*<img.*?</a>"  # these stay as they are
    r'|<code>(?P<code>[^<]*)</code>|<img [^>]*?src="(?P<picture>[^"]+\.png)"[^>]*>',
    re.S,
)
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
FOR_PHONES = {"headline.png": "headline-narrow.png"}
"""Pictures that have another one beside them for narrow screens."""
COLOURS = "hf_posenc/evaluation/page/colours.css"
"""The colours of the report page, which are those of the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns of the navigation; show the menu of versions where mike builds the site."""
    config.nav = navigation.expand(config.nav or [], Path(config.docs_dir))
    if "MIKE_DOCS_VERSION" in os.environ:  # the menu reads a file that only mike writes
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and colours that lie beside docs/, and the notebook as a page."""
    for name in COPIES:
        content = links.from_root((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, name.lower(), content=content))
    content = notebook.page(Path(config.docs_dir))
    files.append(File.generated(config, notebook.PAGE, content=content))
    files.append(File.generated(config, "assets/colours.css", abs_src_path=str(ROOT / COLOURS)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill what is made from the package, drop comments, and turn links out of docs/ into links into the repository."""
    name = page.file.src_uri
    titles = {file.src_uri: _title(file) for file in files}
    for begin, factor in BOOST.items():
        if name.startswith(begin):
            page.meta["search"] = {"boost": factor}
    # A model card's, for the hub: a hit in one would outweigh every title a thousandfold.
    page.meta.pop("tags", None)
    filled = reference.with_class(reference.filled(markdown), name)
    filled = filled.replace(f"]({notebook.NOTEBOOK})", f"]({notebook.PAGE})")
    if config.repo_url:
        filled = filled.replace("git clone REPOSITORY", f"git clone {config.repo_url}")
    return links.for_site(filled, name, titles, config.repo_url or "")


@functools.cache
def _title(file: File) -> str:
    """Return the first heading of a page; of other files nothing."""
    page = file.content_string if file.is_documentation_page() else ""
    return next(iter(re.findall("^# (.*)$", page, re.M)), "")


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Replace formulas by MathML, and make code and pictures fit a narrow screen."""
    return NARROW.sub(_narrow, mathml.rendered(html, page.file.src_uri))


def _narrow(match: re.Match[str]) -> str:
    """Keep short code and options on one line, and let a picture open in full size."""
    if match["picture"]:
        folder, slash, file = match["picture"].rpartition("/")
        image = match[0]
        if file in FOR_PHONES:
            narrow = f"{folder}{slash}{FOR_PHONES[file]}"
            source = f'<source media="(max-width: 45em)" srcset="{narrow}">'
            image = f"<picture>{source}{image}</picture>"
        wide = ' class="wide"' if file not in FOR_PHONES and "data" in folder.split("/") else ""
        return f'<a{wide} href="{match["picture"]}">{image}</a>'
    if match["code"] is None:
        return match[0]
    if len(match["code"]) <= SHORT:
        return f'<code class="short">{match["code"]}</code>'
    return f"<code>{OPTION.sub(lambda option: f'<span>{option[0]}</span>', match['code'])}</code>"
