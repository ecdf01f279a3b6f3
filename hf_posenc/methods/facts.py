"""Methods in words: what `hf-posenc show` and the pages print of each."""

from __future__ import annotations

import dataclasses
import inspect
import re

from hf_posenc.methods.base import REGISTRY, LengthDependent, Method, TableFilter

KINDS = {
    "frequencies": "Frequencies: the rotary table is changed, attention stays the model's own",
    "bands": "Rotary bands: near and far keys are rotated by different positions",
    "biases": "Biases: added to the scores; the rotation is dropped unless keep_rope is set",
    "others": "Others: queries are scaled, or queries and keys changed",
    "tables": "Tables: one row for each position, of models without rotary embedding, made longer",
}
"""Title of each kind of method."""


def facts(method: type[Method]) -> dict[str, str]:
    """Return the facts of a method in plain words, by their labels: what `show` prints and its page has."""
    found = {"Kind": KINDS[method.kind]}
    if issubclass(method, LengthDependent):
        found["Kind"] = (
            "Frequencies: each query has the rotary table of its length, in an attention of hf_posenc; with "
            'update="sequence" attention stays the model\'s own'
        )
    if method.aliases:
        found["Also"] = ", ".join(method.aliases)
    adds = "yes" if method.trainable else method.trainable_with or "no"
    found |= {"Needs": method.needs, "Adds parameters": adds}
    if method.length_dependent or method.follows_text:
        found["Length"] = (
            "follows the text" if method.follows_text else "two tables: up to L, past L"
        )
    elif method.takes_scale():
        optional = method.knobs()["scale"] is not dataclasses.MISSING
        found["Length"] = f"set by scale or target_length{', if given' if optional else ''}"
    else:
        found["Length"] = "set by no scale"
    found |= {"Composes with (RoPE)": composes_with(method), "Source": method.source}
    return found


def composes_with(method: type[Method]) -> str:
    """Return the methods that a list may have beside a method, in words."""
    bands = method.seam != "attention" and "attention" in (*method.beside, *method.beside_kept)
    biases = (each for each in REGISTRY.values() if each.seam == "bias")
    apart = [each.name for each in biases if "attention" not in each.beside_kept]
    kept = "a bias with keep_rope=True" + f" (not {', '.join(apart)})" * (not bands)
    tables = [each for each in REGISTRY.values() if each.seam == "rotary"]
    dropping = (each.name for each in tables if "bias" not in each.beside)  # the rotation itself
    but = f" (not {', '.join(dropping)})" * (method.seam != "query")
    words = {
        "rotary": f"{'a' if bands else 'a static'} frequency method{but}",
        "attention": "rotary bands, xpos, rope_bias",
        "query": "log_n or temperature",
        "bias": "a bias" if method.seam == "query" else kept,
    }
    if method.seam == "rotary":
        before = f"a frequency method before it{but}, other filters"
        words["rotary"] = before if issubclass(method, TableFilter) else "filters after it"
    else:
        words.pop(method.seam, None)
    beside, rotating = (
        ", ".join(text for seam, text in words.items() if seam in seams)
        for seams in (method.beside, {*method.beside_kept} - {*method.beside})
    )
    alone = "" if {*method.beside} <= {*method.beside_kept} else " alone"
    return (f"{beside}; with keep_rope=True {rotating}{alone}" if rotating else beside) or "nothing"


def knob_rows(method: type[Method]) -> list[tuple[str, str, str]]:
    """Return the knobs of a method: the name, the default as Python writes it, and what it is."""
    meanings: dict[str, str] = {}
    for base in reversed(method.__mro__):
        meanings |= read_docstring(base)[1]
    return [
        (
            knob,
            "must be given" if default is dataclasses.MISSING else repr(default),
            meanings.get(knob, ""),
        )
        for knob, default in method.knobs().items()
    ]


def read_docstring(cls: type) -> tuple[list[str], dict[str, str]]:
    """Return the paragraphs of a Google-style docstring, unwrapped, and the meaning of each argument."""
    text = inspect.cleandoc(cls.__doc__ or "")
    body, _, arguments = text.partition("\nArgs:\n")
    paragraphs = [" ".join(part.split()) for part in body.split("\n\n") if part.strip()]
    meanings: dict[str, str] = {}
    for line in arguments.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            meanings[start[1]] = start[2]
        elif meanings and line.startswith("        "):
            last = next(reversed(meanings))
            meanings[last] += f" {line.strip()}"
    return paragraphs, meanings
