"""HTML of a page as narrow screens need it: code that breaks at the right places, pictures that open in full size."""

from __future__ import annotations

import re

SHORT = 30
"""Characters of inline code that stays on one line."""
KEPT = re.compile(r"<pre.*?</pre>|<svg.*?</svg>", re.S)
LINK = re.compile(r"(<a [^>]*>.*?</a>)", re.S)
CODE = re.compile(r"<code>([^<]*)</code>")
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
PICTURE = re.compile(r'<img [^>]*?src="(?P<source>[^"]+\.png)"[^>]*>')


def readable(html: str) -> str:
    """Return the HTML with short code, and every option in longer code, on one line, and pictures as links."""
    parts, start = [], 0
    for block in KEPT.finditer(html):
        parts += [_changed(html[start : block.start()]), block[0]]
        start = block.end()
    return "".join([*parts, _changed(html[start:])])


def _changed(html: str) -> str:
    parts = LINK.split(html)
    for index in range(0, len(parts), 2):  # a picture in a link has one
        parts[index] = PICTURE.sub(lambda m: f'<a href="{m["source"]}">{m[0]}</a>', parts[index])
    return CODE.sub(_unbroken, "".join(parts))


def _unbroken(match: re.Match[str]) -> str:
    if len(match[1]) <= SHORT:
        return f'<code class="short">{match[1]}</code>'
    return f"<code>{OPTION.sub(lambda option: f'<span>{option[0]}</span>', match[1])}</code>"
