"""Perplexity: every candidate on the same tokens; `measure_perplexity`, its parts, and the tokens of LongPPL.

LongPPL is perplexity over the tokens that need a long context (Fang et al. 2024, arXiv 2410.23771). An evaluator model
reads every document twice: as a whole, and in pieces that begin at most K + step - 1 tokens before the token that they
predict. With the log-probabilities `l` in the long and `s` in the short context, a token is a *key token* if

    LSD = l - s > alpha (the long-short difference)    and    LCL = l > beta (the long-context likelihood)

and LongPPL of the measured model is exp of its mean loss over these tokens.

Deliberate differences from the authors' package (`longppl` 0.3.0): losses are float32 whatever the dtype of the model,
which matters for tokens next to a threshold. A last piece of a single token is scored, where theirs raises. The
evaluator has the measured model's tokenizer.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Entry, TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import MethodEntry, nan_if_none
from hf_posenc.evaluation.measuring import execute as machine
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import (
    UNPATCHED,
    Candidate,
    checked_candidates,
    within_reach,
)
from hf_posenc.evaluation.measuring.execute import Attempt, Failures, Progress, Value, silent
from hf_posenc.evaluation.measuring.identity import model_identity, tokenizer_hash
from hf_posenc.evaluation.measuring.statistics import Failure, Record, curve
from hf_posenc.evaluation.measuring.store import Key, Records
from hf_posenc.evaluation.options import PerplexityOptions, output_folder, with_fields
from hf_posenc.evaluation.perplexity.protocols import (
    SELF,
    Settings,
    Window,
    parse_evaluator,
    plan,
    settings_of,
)
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.estimate import ModelShape, forward_flops
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.model.context import length_of
from hf_posenc.patch.patching import get_patch

# The key tokens of LongPPL.

SHORT = 4096
"""K, tokens of the short context, as in the authors' code."""
STEP = 1024
"""Tokens that share one short context, as in the authors' code."""
ALPHA, BETA = 2.0, -2.0
"""The paper's thresholds, in nats."""


def key_tokens(
    scorer: Callable[[Tensor, int], Tensor],
    ids: Tensor,
    *,
    short: int = SHORT,
    step: int = STEP,
    alpha: float = ALPHA,
    beta: float = BETA,
) -> Tensor:
    """Find the tokens that an evaluator predicts well, and only in their long context.

    Args:
        scorer: The evaluator's `TokenScorer`, or a function with its signature. The evaluator must be in evaluation
            mode, and good at this length.
        ids: Token ids of one document, shape (n,), with the evaluator's special tokens in front.
        short: K, tokens of the short context; the first K tokens are never key.
        step: Tokens that share one short context. Smaller is closer to the paper's definition, and costs more: every
            step runs `short + step` tokens.
        alpha: Least long-short difference, in nats.
        beta: Least log-probability in the long context, in nats.

    Returns:
        True for key tokens, shape (n,), bool, on the CPU. False where a loss is not a number.
    """
    key = torch.zeros(len(ids), dtype=torch.bool)
    if len(ids) <= short:
        return key
    in_long = scorer(ids, short)
    # K tokens that are context only, and up to `step` tokens behind them that a piece scores.
    pieces = (ids[begin : begin + short + step] for begin in range(0, len(ids) - short, step))
    in_short = torch.cat([scorer(piece, short) for piece in pieces])
    key[short:] = (in_short - in_long > alpha) & (-in_long > beta)
    return key


@dataclass(frozen=True)
class Evaluator:
    """A model that selects the tokens that need far context; `short`: tokens of the short context."""

    name: str
    model: nn.Module
    tokenizer: Any
    candidate: Candidate
    special: Sequence[int]
    short: int

    @property
    def step(self) -> int:
        """Tokens that share one short context: a quarter of it, as the authors' 1,024 of 4,096."""
        return max(1, self.short // 4)

    def key_tokens(self, document: TokenizedDocument, length: int) -> Tensor:
        """Return the key tokens among the first of a document, `length` with special tokens, shape (n,), bool."""
        special = torch.tensor(list(self.special), dtype=torch.int64)
        ids = torch.cat([special, document.tokens(0, length - len(special))])
        with evaluation_mode(self.model), self.candidate.applied(self.model, length):
            scorer = TokenScorer(self.model, ids)
            scorer.pieces = not self.candidate.length_dependent
            scorer.stateful = self.candidate.stateful
            key = key_tokens(scorer, ids, short=self.short, step=self.step)
        return key[len(special) :]

    def to_dict(self) -> dict[str, Any]:
        """Return everything that determines the key tokens."""
        identity = model_identity(self.model, self.name)
        return {
            "name": identity.pop("name"),
            "patch": self.candidate.spec,
            "model": identity,
            "tokenizer_sha256": tokenizer_hash(self.tokenizer),
            "special": list(self.special),
            "short": self.short,
            "step": self.step,
            "alpha": ALPHA,
            "beta": BETA,
        }


def evaluator_of(
    options: PerplexityOptions,
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    original: int | None,
    policy: str,
    load: Callable[[str], tuple[nn.Module, Any]] | None,
) -> Evaluator:
    """Return the evaluator that `NAME` or `NAME@METHOD:option=value` describes: the measured model, or one to load.

    Its short context has the paper's 4,096 tokens; for shorter texts the trained length, or a quarter of the text.

    Raises:
        PosencError: An evaluator with another tokenizer, or one without a method that would read texts longer than it
            was trained for: its predictions there are broken, and so would be the choice of the tokens.
    """
    name, spec = parse_evaluator(options.longppl or SELF)
    if name != SELF:
        if load is None:
            raise PosencError(f"longppl={name!r}: in Python only {SELF!r}, with @METHOD or not.")
        model, own = load(name)
        if tokenizer_hash(own) != tokenizer_hash(tokenizer):
            raise PosencError(
                f"--longppl {name}: its tokenizer is not the measured model's, so its tokens are others. Give a model "
                f"with the same tokenizer, or {SELF}@METHOD, such as {SELF}@rerope."
            )
    short, longest = SHORT, settings.lengths[-1]
    candidate = Candidate.parse(spec or UNPATCHED).checked(model)
    trained = length_of(model, replaced=True)
    if not candidate.parts and get_patch(model) is None:
        # The tokens that it reads as it was loaded: a scaling of its config counts, but not for `original`.
        reach = length_of(model)
        if name == SELF and reach == trained and original is not None:
            reach = original
        if reach is not None and longest > reach:
            raise PosencError(
                f"--longppl {options.longppl}: an evaluator has to be good at {longest:,} tokens, and unpatched this "
                f"one is so up to its trained length, {reach:,}, at most. Give {name}@METHOD, such as {name}@rerope, "
                f"the name of a model with a longer context, or --lengths up to {reach}."
            )
    if longest <= SHORT:
        trained = trained or original
        short = trained if trained is not None and trained < longest else longest // 4
    return Evaluator(
        name=name,
        model=model,
        tokenizer=tokenizer,
        candidate=candidate,
        special=special_prefix(tokenizer, policy),
        short=options.longppl_short or short,
    )


# The measurement.

EMBEDDED_DOCUMENTS = 12
"""Default number of the held-out modules."""

WINDOWS_PER_ITEM = 64
"""A long document is measured in parts of so many windows, so that an interrupted run loses little."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Item(machine.Item):
    """Some windows of one document under one patch, for these lengths; its cells are pairs of protocol and length."""

    lengths: tuple[int, ...]
    document: str
    windows: tuple[Window, ...]

    def operations(self, shape: ModelShape) -> float:
        """Return the operations of its windows: those of truncation are shorter than its lengths."""
        counts = Counter((w.forwarded, w.tokens - w.first_scored) for w in self.windows)
        return sum(count * forward_flops(shape, *sizes) for sizes, count in counts.items())


NOTHING = (0.0, 0, 0, 0, 0.0, 0.0)
"""Nats, tokens, bytes, words, weighted loss and weight of no token: the last fields of a `Record`."""


Curve = dict[str, list[Any]]
"""Nats and tokens of every bucket of the longest prefix."""


def _sum_of_curves(one: Curve | None, two: Curve) -> Curve:
    if one is None:
        return two
    return {name: [a + b for a, b in zip(one[name], two[name], strict=True)] for name in one}


def _plus(total: Sequence[Any], part: Sequence[Any]) -> list[Any]:
    """Add totals over tokens; unknown bytes and words stay unknown, and a loss that was not finite stays NaN."""
    pairs = zip(total, part, strict=True)
    sums = [None if a is None or b is None else a + b for a, b in pairs]
    sums[0], sums[4] = nan_if_none(sums[0]), nan_if_none(sums[4])
    return sums


class PerplexityRun(machine.MethodsRun[Item, PerplexityResult]):
    """The perplexity of every candidate, each `checked` against the model, on every document.

    Documents have at least `settings.shortest_document` tokens, with the token ids `special` in front. For `longppl`,
    the `evaluator` selects the key tokens while nothing is patched in. `metadata` has `model`, `source`, `original`,
    `skipped` and `command` of the result. `read` is the number of documents before they are joined.
    """

    kind = "perplexity"
    undecided = ("base", "preset")  # of the summary
    settings: Settings

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[TokenizedDocument],
        candidates: Sequence[Candidate],
        settings: Settings,
        *,
        special: Sequence[int] = (),
        evaluator: Evaluator | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.candidates, self.read = model, candidates, len(documents)
        self.documents = joined(documents) if settings.streams else documents
        self.settings, self._evaluator = settings, evaluator
        self.metadata = metadata or {}
        self._key_tokens: dict[int, Tensor] = {}
        self.special = torch.tensor(list(special), dtype=torch.int64)
        self.items = self._items(settings.lengths)
        identity.check_vocabulary(model, max(document.largest() for document in documents))
        with evaluation_mode(model):
            probe = torch.cat([self.special, documents[0].tokens(0, 16)])
            sizes = {"chunk": settings.chunk, "prefill": settings.prefill, "batch": settings.batch}
            self.scorer = TokenScorer(model, probe, **sizes)

    def part(
        self,
        candidates: Sequence[Candidate],
        documents: Sequence[TokenizedDocument],
        lengths: Sequence[int] | None = None,
    ) -> PerplexityRun:
        """Return the measurement of some candidates and documents, at some of the lengths; the records are the same."""
        part = copy.copy(self)
        part.candidates, part.documents = candidates, documents
        part.items = part._items(tuple(lengths or self.settings.lengths))
        return part

    def windows(self, document: TokenizedDocument, **how: Any) -> Sequence[Window]:
        """Return the forwards over a document; `how` are arguments of `plan`."""
        return plan(len(document.ids), self.settings, special=len(self.special), **how)

    def _items(self, lengths: tuple[int, ...]) -> list[Item]:
        @cache  # most candidates have the same windows, and there may be many
        def windows(
            index: int, lengths: tuple[int, ...], shared: bool, most: int | None
        ) -> tuple[Window, ...]:
            how: dict[str, Any] = {"lengths": lengths, "shared_prefix": shared, "most": most}
            return tuple(self.windows(self.documents[index], **how))

        items = []
        keys = [document_key(document.to_dict()) for document in self.documents]
        for candidate in self.candidates:
            groups = [(length,) for length in lengths] if candidate.auto_scale else [lengths]
            for group, index in itertools.product(groups, range(len(keys))):
                planned = windows(index, group, not candidate.length_dependent, candidate.most)
                for block, begin in enumerate(range(0, len(planned), WINDOWS_PER_ITEM)):
                    part = planned[begin : begin + WINDOWS_PER_ITEM]
                    cells = (span.cell for window in part for span in window.spans)
                    item = Item(
                        key=(candidate.key, group[0], group[-1], keys[index], block),
                        candidate=candidate,
                        length=group[-1],
                        cost=sum(window.forwarded for window in part),
                        cells=tuple(dict.fromkeys(cells)),
                        order=index,
                        lengths=group,
                        document=self.documents[index].name,
                        windows=part,
                    )
                    items.append(item)
        return items

    def prepare(self, store: Records, items: Sequence[Item]) -> None:
        """Find the key tokens of the items' documents, or read them from the store."""
        if self._evaluator is None:
            return
        for index in dict.fromkeys(item.order for item in items):
            document = self.documents[index]
            key = ("key tokens", document_key(document.to_dict()))
            if (stored := store.get(key)) is None:
                found = self._evaluator.key_tokens(document, self.settings.lengths[-1])
                stored = {"tokens": len(found), "key": found.nonzero()[:, 0].tolist()}
                store.append(key, stored)
            mask = self._key_tokens[index] = torch.zeros(stored["tokens"], dtype=torch.bool)
            mask[stored["key"]] = True

    def measure(self, item: Item, attempt: Attempt) -> Value:
        """Run the windows of an item, and add up their spans."""
        document, sums = self.documents[item.order], dict[tuple[str, int], list[Any]]()
        longest: Curve | None = None
        waiting, advanced, forwarded = list(item.windows), 0, 0
        while waiting:
            batch = [_without_lost(window, attempt) for window in waiting[: self.settings.batch]]
            same = list(next(itertools.groupby(batch, key=lambda window: window.shape))[1])
            if same[0].spans:
                texts = ((self.special[: w.special], document.tokens(w.begin, w.end)) for w in same)
                ids, (_, first, last) = torch.stack([*map(torch.cat, texts)]), same[0].shape
                ends = (span.cell for w in same for span in w.spans if span.stop == w.tokens)
                losses = attempt(partial(self.scorer, ids, first, read_last=last), ends)
                if losses is None:
                    continue  # the cells of their last tokens are lost, those of shorter prefixes not
                forwarded += sum(window.forwarded for window in same)
                for window, part in zip(same, losses, strict=True):
                    if added := self._add(sums, item.order, window, part):
                        longest = _sum_of_curves(longest, added)
            advanced += sum(window.forwarded for window in waiting[: len(same)])
            waiting = waiting[len(same) :]
            attempt.advance(advanced)
        return {
            "sums": [[*cell, *total] for cell, total in sums.items() if not attempt.is_lost(cell)],
            "curve": longest,
            "forwarded": forwarded,
        }

    def _add(
        self, sums: dict[tuple[str, int], list[Any]], index: int, window: Window, losses: Tensor
    ) -> Curve | None:
        """Add up the spans of a window; return the curve of the longest prefix if it is one of them."""
        document, longest = self.documents[index], None
        offset = window.begin - window.special
        for span in window.spans:
            part = losses[span.first - window.first_scored : span.stop - window.first_scored]
            first, stop = offset + span.first, offset + span.stop
            size, words = document.bytes_between(first, stop), document.words_between(first, stop)
            weight = span.weight
            if span.protocol == "longppl":
                key = self._key_tokens[index][first:stop]
                part, size, words, weight = part[key], None, None, float(key.sum())
            nats = float(part.sum())
            weighted = nats if weight == len(part) else nats / max(1, len(part)) * weight
            new = (nats, len(part), size, words, weighted, weight)
            sums[span.cell] = _plus(sums.get(span.cell, NOTHING), new)
            if span.cell == ("prefix", self.settings.lengths[-1]):
                longest = curve(part, first + window.special, span.length, self.settings.buckets)
        return longest

    def collect(self, values: Mapping[Key, Value]) -> PerplexityResult:
        """Add up the parts of every document, and leave out the cells in which any document failed."""
        sums: dict[tuple[str, str, int, int], list[Any]] = {}
        curves: dict[str, Curve] = {}
        for item in self.items:
            value = values[item.key]
            for protocol, length, *numbers in value.get("sums", ()):
                key = item.label, protocol, length, item.order
                sums[key] = _plus(sums.get(key, NOTHING), numbers)
            if part := value.get("curve"):
                part = {**part, "nats": [nan_if_none(loss) for loss in part["nats"]]}
                curves[item.label] = _sum_of_curves(curves.get(item.label), part)
        for (*_, index), total in sums.items() if self.settings.preset == "lm-eval" else ():
            if total[3] is not None:  # the harness counts re.split(r"\s+"): white ends too
                total[3] += self.documents[index].white_ends
        labels = [candidate.label for candidate in self.candidates]
        protocols, longest = self.settings.protocols, self.settings.lengths[-1]
        reasons = Failures.of(self.items, values.get).reasons()
        for label in labels:
            if (label, ("prefix", longest)) in reasons:
                curves.pop(label, None)  # of some documents only

        def rank(key: tuple[Any, ...]) -> tuple[int, ...]:
            return labels.index(key[0]), protocols.index(key[1]), *key[2:]

        lost = sorted(reasons, key=lambda key: (labels.index(key[0]), *key[1]))
        return PerplexityResult(
            candidates=[
                MethodEntry.of(c, not (c.length_dependent or c.auto_scale)) for c in self.candidates
            ],
            documents=[document.to_dict() for document in self.documents],
            records=[
                Record(*key[:3], self.documents[key[3]].name, *sums[key])
                for key in sorted(sums, key=rank)
                if (key[0], key[1:3]) not in reasons
            ],
            failures=[
                Failure(key[0], str(key[1][0]), int(key[1][1]), reasons[key]) for key in lost
            ],
            curves={label: (each["nats"], each["tokens"]) for label, each in curves.items()},
            **self.described,
        )


def _without_lost(window: Window, attempt: Attempt) -> Window:
    """Return the window without the spans of lost cells, no longer than the other spans need."""
    spans = tuple(span for span in window.spans if not attempt.is_lost(span.cell))
    if not spans or len(spans) == len(window.spans):
        return dataclasses.replace(window, spans=spans)
    # Only a prefix has spans that end before the window does.
    excess = window.tokens - max(span.stop for span in spans)
    return dataclasses.replace(window, spans=spans, end=window.end - excess)


def document_key(document: Mapping[str, Any]) -> str:
    """Return the key of a document in the records, from its description in a result."""
    # The text too: with unknown tokens or a normalizer, texts of other bytes and words have the same tokens.
    hashes = [document[name][:16] for name in ("tokens_sha256", "text_sha256") if document[name]]
    return " ".join([document["name"], *hashes])


def measure_perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry],
    options: PerplexityOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> PerplexityResult:
    """Measure methods against each other on the same tokens.

    Each method is patched in and undone, so the model is unchanged at the end.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or the entries of a reader of `hf_posenc.evaluation.documents`.
        options: Methods, lengths, protocols and their numbers.
        output: Folder of the records: an interrupted call, made again, resumes.
        progress: Called after every forward with the method's label, operations done and in all.
        **fields: Fields of `PerplexityOptions` that replace those of `options`, such as `methods` or `tail_tokens`.

    Returns:
        Perplexities by method, protocol and length: `cells`, `tables()`, `plot()`, `write(folder)`.

    Raises:
        PosencError: Options exclude each other, or no document can be used.

    Examples:
        >>> from hf_posenc.evaluation import measure_perplexity
        >>> methods, lengths = ["none", "pi:scale=2"], [64, 128]  # in tokens
        >>> result = measure_perplexity(model, tokenizer, texts, methods=methods, lengths=lengths)
        >>> result.cell("pi (scale 2)", "tail", 128).perplexity > 1
        True
    """
    folder = output_folder(output, progress)
    options = with_fields(PerplexityOptions, options, fields)
    run = prepare(model, tokenizer, Source.of(documents), options)
    return cast(PerplexityResult, run.run(folder, progress=progress))


def prepare(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: PerplexityOptions,
    *,
    name: str | None = None,
    command: str | None = None,
    load: Callable[[str], tuple[nn.Module, Any]] | None = None,
) -> PerplexityRun:
    """Check the methods against the model, choose lengths and protocols, and read the documents.

    `name` is the model's in results, by default read from its config; `command` gives this result again. `load` loads
    the model and the tokenizer of a name, for an evaluator of LongPPL that is another model.
    """
    identity.check_weights(model)
    identity.check_tokenizer(tokenizer)
    candidates, original = checked_candidates(model, options.methods)
    settings, policy = settings_of(options, original)
    lengths = within_reach(model, candidates, settings.lengths, given=options.lengths is not None)
    if lengths != settings.lengths:
        settings, policy = settings_of(dataclasses.replace(options, lengths=lengths), original)
    special = special_prefix(tokenizer, policy)
    needed = max(1, settings.shortest_document - len(special))
    windows = settings.windows_per_document or 1
    documents, skipped, about = source.load(
        tokenizer,
        options,
        min_tokens=needed,
        embedded_limit=EMBEDDED_DOCUMENTS,
        embedded_tokens=max(needed, windows * settings.lengths[-1] - len(special)),
    )
    evaluator = None
    if options.longppl is not None:
        evaluator = evaluator_of(options, settings, model, tokenizer, original, policy, load)
        protocols = (*settings.protocols, "longppl")
        settings = dataclasses.replace(settings, protocols=protocols, evaluator=evaluator.to_dict())
    return PerplexityRun(
        model,
        documents,
        candidates,
        settings,
        special=special,
        evaluator=evaluator,
        metadata={
            "model": identity.describe_model(name, model, tokenizer, special, policy),
            "source": about,
            "original": original,
            "skipped": skipped,
            "command": command,
        },
    )


def joined(documents: Sequence[TokenizedDocument]) -> list[TokenizedDocument]:
    """Return the documents as one stream of tokens; a single one, maybe larger than memory, stays in its file."""
    if len(documents) == 1:
        return list(documents)
    identities = [document.to_dict() for document in documents]
    hashes = [f"{each['tokens_sha256']} {each['text_sha256']}" for each in identities]
    digest = hashlib.sha256("\n".join(hashes).encode())
    ids = torch.cat([document.tokens(0, len(document.ids)) for document in documents])
    name = f"stream of {len(documents)} document{'s' * (len(documents) != 1)}"
    byte_ends = _cumulative([document.byte_ends for document in documents])
    word_ends = _cumulative([document.word_ends for document in documents])
    return [TokenizedDocument(name, ids, byte_ends, digest.hexdigest(), word_ends)]


def _cumulative(ends: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in ends if part is not None]
    if len(known) < len(ends):
        return None
    return torch.cat([part.diff(prepend=part.new_zeros(1)) for part in known]).cumsum(0)
