"""Text of a page that the repository and the site need differently: links out of docs/, comments."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

FENCED = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence) *$", re.M | re.S
)
CODE = re.compile(r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)", re.S)
COMMENT = re.compile(r"^[ >]*<!--.*?-->[ ]*$|<!--.*?-->", re.M | re.S)
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^][]|\[[^][]*\])*)\]\((?P<target>[^)\s]+)(?P<title>\s+\"[^\"]*\")?\)"
)
BRANCH = "blob/main"


def outside_code(text: str, change: Callable[[str], str], *, inline: bool = True) -> str:
    """Apply a change to the text between blocks of code, and with `inline` between spans of code too."""
    parts = []
    start = 0
    for match in FENCED.finditer(text):
        parts += [_between(text[start : match.start()], change, inline), match[0]]
        start = match.end()
    return "".join([*parts, _between(text[start:], change, inline)])


def _between(text: str, change: Callable[[str], str], inline: bool) -> str:
    if not inline:
        return change(text)
    # Spans of code are kept apart as characters of the private area, since a link may contain one.
    spans = [match[0] for match in CODE.finditer(text)]
    kept = iter(range(len(spans)))
    hidden = change(CODE.sub(lambda _: chr(0xE000 + next(kept)), text))
    return re.sub("[\ue000-\uf8ff]", lambda match: spans[ord(match[0]) - 0xE000], hidden)


def from_root(text: str) -> str:
    """Return the text of a page of the repository's top folder with links as from docs/."""

    def change(match: re.Match[str]) -> str:
        target = match["target"]
        if ":" not in target and not target.startswith("#"):
            target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"{match['image']}[{match['text']}]({target}{match['title'] or ''})"

    return outside_code(text, lambda part: LINK.sub(change, part))


def for_site(text: str, page: str, titles: Mapping[str, str], repository: str) -> str:
    """Return the Markdown of a page without comments and with links that lead somewhere on the site.

    `titles` has the title of every page of the site; it replaces a link's text that is the name of the file. A link to
    something that is not part of the site leads to the repository at `repository`. Without that URL it becomes its text
    and the path. A link to a copied page (`../CONTRIBUTING.md`) leads to the copy.
    """

    def change(match: re.Match[str]) -> str:
        target, mark, anchor = match["target"].partition("#")
        title = match["title"] or ""
        if not target or ":" in target or match["image"]:
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.lower() in titles and "/" not in path:
            copy = posixpath.relpath(path.lower(), posixpath.dirname(page) or ".")
            return f"[{match['text']}]({copy}{mark}{anchor}{title})"
        name = path.removeprefix("docs/")
        if name in titles or (path.startswith("docs/") and path.endswith(".md")):
            shown = titles.get(name, "") if path.endswith(match["text"]) else ""
            return f"[{shown or match['text']}]({match['target']}{title})"
        if repository:
            url = f"{repository.rstrip('/')}/{BRANCH}/{path}"
            return f"[{match['text']}]({url}{mark}{anchor}{title})"
        return f"`{path}`" if path.endswith(match["text"]) else f"{match['text']} (`{path}`)"

    def changed(part: str) -> str:
        return LINK.sub(change, COMMENT.sub("", part))

    # A text that is the path itself need not have it twice.
    return re.sub(r"(`[^`\n]+`) \(\1\)", r"\1", outside_code(text, changed))
