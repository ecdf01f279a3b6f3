"""Formulas as MathML, made when the site is built: browsers draw it without a script."""

from __future__ import annotations

import html as entities
import logging
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>',
    re.S,
)
UNKNOWN = re.compile(r"<m[iotn]>(\\[^<]*|&)</m[iotn]>")
NAMED = "<m[io]>(?:ln|log|cos|sin|exp|min|max)</m[io]>"
NAME = f"(?:<msub>{NAMED}.*?</msub>|(?<!<msub>){NAMED})"
THIN = '<mspace width="0.167em"/>'
SPACING = (
    (re.compile(f"(</m(?:i|n|frac|row|sub|sup|subsup|sqrt)>)({NAME})"), rf"\1{THIN}\2"),
    (re.compile(f"({NAME})(?=<(?!mo|/|mspace))"), rf"\1{THIN}"),
    (re.compile("<mo>(min|max)</mo>"), r'<mo lspace="0em" rspace="0em">\1</mo>'),
)
"""Thin spaces around the names of functions, as TeX sets them: none before a bracket, or where another space is."""
SAME = {"aligned": "align*", "split": "align*"}
"""Environments that GitHub's MathJax has under a name that the converter does not."""
log = logging.getLogger("mkdocs.hooks.mathml")


def split(source: str) -> list[str]:
    """Return the parts of a displayed formula between wide spaces, which a narrow screen stacks."""
    parts, depth = [""], 0
    for piece in re.split(r"(\\qquad|\\begin|\\end|\\[{}]|[{}])", source):
        depth += (piece in ("{", r"\begin")) - (piece in ("}", r"\end"))
        if piece == r"\qquad" and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def rendered(html: str, page: str) -> str:
    """Return the HTML of a page with its formulas as MathML; warn about one that cannot be converted."""

    def change(match: re.Match[str]) -> str:
        source = entities.unescape(match["inline"] or match["block"]).strip()
        if match["block"] and len(parts := split(source)) > 1:
            return f'<div class="formula">{"".join(one(part, "block") for part in parts)}</div>'
        return one(source, "inline" if match["inline"] else "block")

    def one(source: str, display: str) -> str:
        given = source
        for name, other in SAME.items():
            source = re.sub(rf"\\(begin|end)\{{{name}\}}", rf"\\\1{{{other}}}", source)
        try:
            formula = convert(source, display=display)
        except Exception as error:
            log.warning("%s: cannot convert the formula %s: %r", page, source, error)
            return entities.escape(given)
        if unknown := UNKNOWN.search(formula):
            log.warning("%s: unknown %s in the formula %s", page, unknown[1], source)
        for pattern, spaced in SPACING:
            formula = pattern.sub(spaced, formula)
        label = entities.escape(source, quote=True)
        return formula.replace("<math ", f'<math alttext="{label}" ', 1)

    return FORMULA.sub(change, html)
