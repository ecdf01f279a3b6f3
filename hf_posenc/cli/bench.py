"""`hf-posenc bench`: one table of what methods do to a model, by perplexity, retrieval, speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.cli import options as inp
from hf_posenc.cli import options as opt
from hf_posenc.cli.loading import Remembers, command_line, open_session
from hf_posenc.cli.presentation import (
    announce,
    present,
    print_costs,
    progress_bar,
    reading,
    say_bench_unfinished,
    say_waiting,
)

NAME = "bench"
NO_TASKS = "none"


def bench(
    context: typer.Context,
    model: opt.ModelArgument = None,
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How much is measured where nothing else is said: smoke (seconds), quick (10 documents, 3 lengths) or "
            "full (20 documents, every doubling up to the target, all retrieval tasks).",
            rich_help_panel=opt.MEASURED,
        ),
    ] = "quick",
    patch: opt.PatchOption = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="L,L,...",
            help="Context lengths in tokens, e.g. 512,1024,4k, or 2k:128k:2k (first, last, step).",
            show_default="the suite's, as multiples of the trained length",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    target_length: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="The longest of the suite's lengths, in tokens, e.g. 32k.",
            show_default="2, 4 or 16 times the trained length",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    preset: opt.PresetOption = None,
    protocol: opt.ProtocolOption = None,
    tail_tokens: opt.TailTokensOption = None,
    stride: opt.StrideOption = None,
    aggregate: opt.AggregateOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Some of passkey, niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe; or all, or none.",
            show_default="the suite's",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Times that the prefill of every method is timed; 0: never.",
            show_default="the suite's",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    compare: opt.CompareOption = None,
    bos: opt.BosOption = None,
    seed: opt.SeedOption = 0,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    config: opt.ConfigOption = None,
    split: opt.SplitOption = "test",
    column: opt.ColumnOption = "text",
    streaming: opt.StreamingOption = True,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Stop at so many usable documents.",
            show_default="the suite's",
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
    prefill_chunk: opt.PrefillChunkOption = None,
    chunk: opt.ChunkOption = None,
    dry_run: opt.DryRunOption = False,
    output: opt.OutputOption = Path("out"),
    plot: opt.PlotOption = None,
    shard: opt.ShardOption = None,
) -> None:
    """Measure methods against each other in one table: perplexity, retrieval, tokens per second, peak memory.

    Without arguments: the embedded model on the held-out modules of this Python's standard library. The weights are
    loaded once, every document is tokenized once. A run that was interrupted goes on where it was when the same command
    is given again. Writes bench.json, bench.csv, table.md, curve.png and heatmap.png.
    """
    from hf_posenc.evaluation.bench.run import Bench, gather, get_suite
    from hf_posenc.evaluation.measuring.candidates import parse_candidates
    from hf_posenc.evaluation.measuring.store import current_shard
    from hf_posenc.evaluation.published import get as get_table

    place = current_shard(shard)
    get_suite(suite)
    parse_candidates(patch or ())
    for name in compare or ():
        get_table(name)
    with_plot = inp.decide_plot(plot)
    if not dry_run:
        inp.check_output(output)
    source, origin = inp.source_of(
        text, dataset, config, split, column, streaming, tokenized, token_dtype
    )
    given: dict[str, Any] = {
        "lengths": _lengths(lengths),
        "target_length": _target(target_length),
        "tasks": _tasks(tasks),
    }
    settings = {
        "protocols": None if protocol is None else inp.names_of(protocol),
        "tail_tokens": tail_tokens,
        "stride": stride,
        "aggregate": aggregate,
        "chunk": chunk,
        "prefill": prefill_chunk,
        "seed": seed,
    }
    session = open_session(
        model, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map, attn=attn
    )
    with reading(place) as seen:
        inputs = gather(
            session.model,
            session.tokenizer,
            source,
            name=session.name,
            origin=origin,
            suite=suite,
            methods=patch,
            **given,
            rounds=rounds,
            limit=limit,
            max_doc_tokens=max_doc_tokens,
            cache=inp.token_cache_of(token_cache, session.tokenizer),
            bos=bos,
            preset=preset,
            compare=compare or (),
            command=command_line(context),
            settings=settings,
            seen=seen,
        )
    work = Bench(inputs)
    if place.index == 0:
        announce(inputs.settings, list(inputs.documents), list(inputs.skipped))
    if dry_run:
        print_costs(work)
        return
    with progress_bar(place) as progress:
        result = work.measure(output, place, progress, say_waiting)
    if result is None:
        say_bench_unfinished(work, place)
        return
    present(result, result.perplexity.model, output, with_plot)


def _lengths(text: str | None) -> tuple[int, ...] | None:
    from hf_posenc.evaluation.perplexity.protocols import parse_lengths

    return None if text is None else parse_lengths(text)


def _target(text: str | None) -> int | None:
    from hf_posenc.evaluation.perplexity.protocols import parse_length

    return None if text is None else parse_length(text, "--target-length")


def _tasks(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text.strip() == NO_TASKS else inp.tasks_of(text)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command(NAME, cls=Remembers)(bench)
