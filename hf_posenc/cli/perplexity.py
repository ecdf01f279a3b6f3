"""`hf-posenc perplexity`: perplexity against context length, method by method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import options as inp
from hf_posenc.cli import options as opt
from hf_posenc.cli.loading import Remembers, Session, command_line, open_session
from hf_posenc.cli.presentation import announce, finish, print_cost, reading

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import TokenizedDocument
    from hf_posenc.evaluation.perplexity.longppl import Evaluator


# `--longppl EVALUATOR`: the model that says which tokens need far context.


def open_evaluator(
    asked: str,
    measured: Session,
    *,
    short: int | None,
    longest: int,
    original: int | None,
    bos: str,
    **options: Any,
) -> Evaluator:
    """Loads what was asked for.

    Args:
        asked: `NAME`, `self`, or either with `@METHOD` behind it.
        measured: The session of the model that is measured.
        short: Tokens of the short context, where they were given.
        longest: The longest length of the run, in tokens.
        original: The measured model's trained length, where it is known.
        bos: Policy for special tokens.
        **options: How to load the evaluator, as `open_session` takes it.

    Raises:
        PosencError: It cannot be loaded, or cannot be patched so.
    """
    from hf_posenc.evaluation.measuring.candidates import Candidate
    from hf_posenc.evaluation.perplexity.longppl import (
        SELF,
        Evaluator,
        default_short,
        split_evaluator,
    )
    from hf_posenc.evaluation.perplexity.runs import special_tokens

    name, spec = split_evaluator(asked)
    session = measured if name == SELF else open_session(name, **options)
    return Evaluator(
        name=name,
        model=session.model,
        tokenizer=session.tokenizer,
        candidate=Candidate.parse(spec).checked(session.model),
        special=special_tokens(session.tokenizer, bos),
        short=short or default_short(longest, original),
    )


def again(
    source: Iterable[Any], documents: Iterable[TokenizedDocument], tokenizer: Any
) -> list[TokenizedDocument]:
    """The same documents once more, in another tokenizer's tokens; reading stops after the last of them.

    Args:
        source: The reader, from its beginning.
        documents: Those that are wanted.
        tokenizer: The other tokenizer.
    """
    from hf_posenc.evaluation.documents import load_documents

    wanted = {document.name for document in documents}

    def only() -> Iterator[Any]:
        for item in source:
            if item.name in wanted:
                wanted.discard(item.name)
                yield item
            if not wanted:
                return

    return load_documents(only(), tokenizer, min_tokens=1)[0]


# The second is the control: plain attention to as many tokens as the model was trained at.
DEFAULT_PATCHES = (
    *("none", "sliding_window", "pi", "ntk", "ntk_mixed", "ntk_by_parts", "llama3"),
    *("yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn", "rerope", "self_extend"),
)
DEMO_DOCUMENTS = 12
NAME = "perplexity"


def perplexity(
    context: typer.Context,
    model: opt.ModelArgument = None,
    patch: opt.PatchOption = None,
    lengths: opt.LengthsOption = None,
    short: Annotated[
        bool,
        typer.Option(
            help="Also measure the original length, where every length given is longer: what do short texts pay?",
            rich_help_panel=opt.MEASURED,
        ),
    ] = True,
    preset: opt.PresetOption = None,
    protocol: opt.ProtocolOption = None,
    tail_tokens: opt.TailTokensOption = None,
    stride: opt.StrideOption = None,
    windows_per_document: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows in each document, evenly spaced: of `tail` (default 1), or of the full ones of `sliding` "
            "(default all).",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    longppl: Annotated[
        str | None,
        typer.Option(
            metavar="EVALUATOR",
            help="Also score the key tokens alone (LongPPL), those that this model predicts by far context: a name, or "
            "self for the measured one; NAME@METHOD patches it, such as self@rerope.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    longppl_short: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Tokens of the evaluator's short context. Default: 4096; for shorter texts the trained length.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    aggregate: opt.AggregateOption = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Parts of the longest prefix for the curve by position. Default: 64.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    bos: opt.BosOption = None,
    bos_windows: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Windows of `sliding` with special tokens in front: every or first. Default: every.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    compare: opt.CompareOption = None,
    seed: opt.SeedOption = 0,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    config: opt.ConfigOption = None,
    split: opt.SplitOption = "test",
    column: opt.ColumnOption = "text",
    streaming: opt.StreamingOption = True,
    limit: opt.LimitOption = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Leave shorter documents out. Default: the longest length, so that every length reads the same ones.",
            rich_help_panel=opt.DOCUMENTS,
        ),
    ] = None,
    max_doc_tokens: opt.MaxDocTokensOption = None,
    tokenized: opt.TokenizedOption = None,
    token_dtype: opt.TokenDtypeOption = "uint16",
    token_cache: opt.TokenCacheOption = None,
    tokenizer: opt.TokenizerOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = None,
    device_map: opt.DeviceMapOption = None,
    attn: opt.AttnOption = None,
    batch_size: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows of one document at once. Halved where memory runs out.",
            rich_help_panel=opt.AT_ONCE,
        ),
    ] = 1,
    prefill_chunk: opt.PrefillChunkOption = None,
    chunk: opt.ChunkOption = None,
    dry_run: opt.DryRunOption = False,
    output: opt.OutputOption = Path("out"),
    plot: opt.PlotOption = None,
    shard: opt.ShardOption = None,
) -> None:
    """Measure perplexity against context length, method by method, on the same tokens.

    Without arguments: the embedded model on the held-out modules of this Python's standard library. A run that was
    interrupted goes on where it was when the same command is given again.
    """
    from hf_posenc.evaluation import published
    from hf_posenc.evaluation.documents import EMBEDDED_SOURCE, load_documents, read_embedded
    from hf_posenc.evaluation.measuring.candidates import original_length, parse_candidates
    from hf_posenc.evaluation.measuring.identity import describe_model
    from hf_posenc.evaluation.measuring.store import current_shard
    from hf_posenc.evaluation.perplexity.longppl import finder, with_evaluator
    from hf_posenc.evaluation.perplexity.measurement import PerplexityRun
    from hf_posenc.evaluation.perplexity.protocols import parse_lengths
    from hf_posenc.evaluation.perplexity.runs import joined, make_settings, special_tokens
    from hf_posenc.evaluation.published import get as get_table

    place = current_shard(shard)
    candidates = parse_candidates(patch or DEFAULT_PATCHES)
    tables = [get_table(name) for name in compare or ()]
    wanted = parse_lengths(lengths) if lengths is not None else None
    with_plot = inp.decide_plot(plot)
    if not dry_run:
        inp.check_output(output)

    def source() -> tuple[Any, dict[str, Any]]:
        given, origin = inp.source_of(
            text, dataset, config, split, column, streaming, tokenized, token_dtype
        )
        if given is None:
            return read_embedded(), EMBEDDED_SOURCE
        return given, origin

    documents, origin = source()
    session = open_session(
        model, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map, attn=attn
    )
    live, words = session.model, session.tokenizer
    candidates = [candidate.checked(live) for candidate in candidates]
    original = original_length(live, candidates)
    if wanted and short and preset is None and original and original < wanted[0]:
        wanted = (original, *wanted)
    names = None if protocol is None else inp.names_of(protocol)
    given = {
        "lengths": wanted,
        "protocols": names,
        "tail_tokens": tail_tokens,
        "stride": stride,
        "windows_per_document": windows_per_document,
        "bos_windows": bos_windows,
        "aggregate": aggregate,
        "buckets": buckets,
        "min_tokens": min_tokens,
        "chunk": chunk,
        "prefill": prefill_chunk,
        "batch": batch_size,
        "seed": seed,
    }
    settings, policy = make_settings(given, original, preset=preset, bos=bos)
    for table in tables:
        published.comparable(table, settings)
    special = special_tokens(words, policy)
    needed = max(1, settings.shortest_document - len(special))
    if not text and dataset is None:
        limit = limit or DEMO_DOCUMENTS
        max_doc_tokens = max_doc_tokens or max(needed, settings.lengths[-1] - len(special))
    with reading(place) as seen:
        usable, skipped = load_documents(
            documents,
            words,
            min_tokens=needed,
            max_tokens=max_doc_tokens,
            limit=limit,
            seen=seen,
            cache=inp.token_cache_of(token_cache, words),
        )
    key_tokens = None
    if longppl is not None:
        evaluator = open_evaluator(
            longppl,
            session,
            short=longppl_short,
            longest=settings.lengths[-1],
            original=original,
            bos=policy,
            dtype=dtype,
            device=device,
            device_map=device_map,
        )
        settings = with_evaluator(settings, evaluator)
        key_tokens = finder(
            evaluator,
            usable,
            words,
            settings.lengths[-1],
            lambda: again(source()[0], usable, evaluator.tokenizer),
        )
    run = PerplexityRun(
        live,
        joined(usable) if settings.streams else usable,
        candidates,
        settings,
        special=special,
        key_tokens=key_tokens,
    )
    if place.index == 0:
        announce(settings, usable, skipped)
    if dry_run:
        print_cost(run)
        return
    finish(
        run,
        place,
        output,
        with_plot,
        tables,
        model=describe_model(session.name, live, words, special, policy),
        source={**origin, "limit": limit, "max_doc_tokens": max_doc_tokens},
        original=original,
        skipped=skipped,
        command=command_line(context),
    )


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command(NAME, cls=Remembers)(perplexity)
