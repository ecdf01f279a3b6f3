"""`hf-posenc search`: a factor for every pair of features, as LongRoPE searches them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli import inputs as inp
from hf_posenc.cli import options as opt
from hf_posenc.cli import tail_runs as tail
from hf_posenc.cli.console import out
from hf_posenc.cli.session import command_line, open_session

DEMO_DOCUMENTS = 24


def search(
    context: typer.Context,
    model: opt.ModelArgument = None,
    target_length: tail.TargetLength = None,
    budget: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=8,
            help="Lists of factors to measure; each costs one forward per tail of every search document.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = 400,
    search_documents: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Documents that the search reads; it is judged on the others. Default: half of them, at most 8.",
            show_default=False,
            rich_help_panel=opt.MEASURED,
        ),
    ] = 0,
    short_texts: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Texts of up to the original length are read with the same factors (safe with a cache), or native: "
            "unchanged (as LongRoPE switches).",
            rich_help_panel=opt.MEASURED,
        ),
    ] = "same",
    attention_factor: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="The factor on cos and sin. Default: it is searched too.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="On a checkpoint that is scaled already: drop its scaling first.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = False,
    max_regression: tail.MaxRegression = None,
    tail_tokens: tail.TailTokens = 0,
    windows_per_document: tail.WindowsPerDocument = 1,
    bos: opt.BosOption = None,
    seed: opt.SeedOption = 0,
    text: opt.TextOption = None,
    dataset: opt.DatasetOption = None,
    config: opt.ConfigOption = None,
    split: opt.SplitOption = "test",
    column: opt.ColumnOption = "text",
    streaming: opt.StreamingOption = True,
    limit: opt.LimitOption = None,
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
    """Search a factor for every pair of features, as LongRoPE does, and judge it on documents it has not read.

    An evolutionary search that starts from PI, NTK and YaRN; the best list is written as a longrope recipe for
    load_patch. A search that was interrupted goes on where it was when the same command is given again.
    """
    from hf_posenc.evaluation.processes import current_shard
    from hf_posenc.evaluation.sweep import report, search_report
    from hf_posenc.evaluation.sweep.factors import rope_of
    from hf_posenc.evaluation.sweep.search import SearchSettings, work
    from hf_posenc.evaluation.sweep.search import search as run_search

    place = current_shard(shard)
    own = SearchSettings(budget, search_documents, short_texts, attention_factor, replace)
    with_plot = inp.decide_plot(plot)
    if not dry_run:
        inp.check_output(output)
    source, origin = inp.source_of(
        text, dataset, config, split, column, streaming, tokenized, token_dtype
    )
    session = open_session(
        model, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map, attn=attn
    )
    original = rope_of(session.model, replace=replace).original_max_position_embeddings
    settings = tail.tail_settings(
        original,
        target_length,
        max_regression=max_regression,
        tail_tokens=tail_tokens,
        windows_per_document=windows_per_document,
        chunk=chunk,
        prefill=prefill_chunk,
        seed=seed,
    )
    inputs = tail.read_inputs(
        session,
        settings,
        place,
        source,
        origin,
        bos=bos,
        limit=limit,
        max_doc_tokens=max_doc_tokens,
        cache=inp.token_cache_of(token_cache, session.tokenizer),
        demo=DEMO_DOCUMENTS,
        command=command_line(context),
    )
    with tail.metering(inputs, None if dry_run else output, place) as (meter, total):
        total[0] = work(meter, settings, own)
        if dry_run:
            out().print(f"{total[0]:,} tokens for {own.budget:,} evaluations.", markup=False)
            return
        result = run_search(meter, settings, own, about=inputs.about, skipped=inputs.skipped)
    if place.index:
        return
    problems = report.problems(result.rows)
    table, lines = search_report.search_table(result), search_report.search_lines(result)
    tail.finish(result, table, lines, problems, output, with_plot)
