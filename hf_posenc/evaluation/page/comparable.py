"""Which results may stand in one table."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source

# What changes how a number is made but not which tokens are scored, or only which numbers there are.
_FREE = frozenset(
    {
        *("lengths", "protocols", "seed", "resamples", "buckets", "min_tokens"),
        *("chunk", "prefill", "batch", "preset"),
    }
)
# What says something about one protocol only.
_OF_PROTOCOL = {
    "tail_tokens": ("tail",),
    "read_last": ("tail",),
    "windows_per_document": ("tail", "sliding"),
    "bos_windows": ("sliding",),
    "stride": ("sliding", "stream"),
    "evaluator": ("longppl",),
}


@dataclass(frozen=True)
class Texts:
    """What was read: results with equal `Texts` read the same tokens.

    Attributes:
        documents: Hash of each document's tokens, in order.
        tokenizer: Hash of the tokenizer.
        special: What stands in front of a window, as JSON.
    """

    documents: tuple[str, ...]
    tokenizer: str
    special: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Texts:
        """Reads it from a result."""
        model = data.get("model", {})
        documents = tuple(_document_id(document) for document in data.get("documents", ()))
        tokenizer = model.get("tokenizer") or data.get("tokenizer") or {}
        special = model.get("bos") or data.get("bos") or {}
        tokens = special.get("token_ids", special) if isinstance(special, dict) else special
        return cls(documents, str(tokenizer.get("sha256", "unknown")), json.dumps(tokens))


def _document_id(document: Mapping[str, Any]) -> str:
    return str(document.get("tokens_sha256") or json.dumps(document, sort_keys=True))


def protocol_key(data: Mapping[str, Any], protocol: str) -> Hashable:
    """Everything that a protocol's numbers mean, the documents aside: its sentence and its settings."""
    return str(data["protocols"][protocol]), json.dumps(_decisive(data, protocol), sort_keys=True)


def _decisive(data: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    settings: dict[str, Any] = data.get("settings", {})
    kept = {
        name: value
        for name, value in settings.items()
        if name not in _FREE and protocol in _OF_PROTOCOL.get(name, (protocol,))
    }
    if kept.get("windows_per_document") not in (
        None,
        1,
    ):  # they are spread over what the longest leaves
        kept["longest length"] = max(settings["lengths"])
    return kept


def why_another(first: Mapping[str, Any], other: Mapping[str, Any], protocol: str) -> str:
    """In words, why two results of one protocol, on the same texts, are not in one table."""
    if first["protocols"][protocol] != other["protocols"][protocol]:
        return f"the other one is: {first['protocols'][protocol]}"
    one, two = _decisive(first, protocol), _decisive(other, protocol)
    return ", ".join(
        f"{name} {two.get(name)} instead of {one.get(name)}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    )


def by_texts(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups results that read the same tokens, in the order of their first appearance."""
    groups: dict[Texts, list[Source]] = {}
    for source in sources:
        groups.setdefault(Texts.of(source.data), []).append(source)
    return list(groups.values())


def why_apart(first: Sequence[Source], other: Sequence[Source]) -> list[str]:
    """In words, why two groups are no one group."""
    one, two = Texts.of(first[0].data), Texts.of(other[0].data)
    reasons = []
    if one.tokenizer != two.tokenizer:
        reasons.append("another tokenizer, so a token is not the same piece of text")
    elif one.documents != two.documents:
        reasons.append(f"other documents ({_documents_differ(first[0].data, other[0].data)})")
    if one.special != two.special:
        reasons.append(f"other special tokens in front ({two.special} instead of {one.special})")
    return reasons


def _documents_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    a, b = (list(data.get("documents", ())) for data in (one, two))
    texts = [[document.get("text_sha256") for document in documents] for documents in (a, b)]
    if texts[0] == texts[1] and None not in texts[0]:
        return "the same texts, cut at other lengths"
    ids = [{_document_id(document) for document in documents} for documents in (a, b)]
    if ids[0] == ids[1]:
        return "the same ones in another order"
    common = len(ids[0] & ids[1])
    cut = len(set(texts[0]) & set(texts[1]) - {None}) - common
    also = f", {cut} more cut at other lengths" if cut > 0 else ""
    return f"{len(b)} instead of {len(a)}, {common} in common{also}"
