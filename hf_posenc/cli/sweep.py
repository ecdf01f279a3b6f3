"""`hf-posenc sweep`: which method, at which scale, for these documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli import inputs as inp
from hf_posenc.cli import options as opt
from hf_posenc.cli import tail_runs as tail
from hf_posenc.cli.console import out
from hf_posenc.cli.search import search
from hf_posenc.cli.session import Remembers, command_line, open_session

DEFAULT_PATCHES = (
    *("pi", "ntk", "ntk_mixed", "ntk_by_parts", "yarn", "dynamic_ntk", "dynamic_yarn"),
    *("rerope", "self_extend"),
)
DEMO_DOCUMENTS = 20


def sweep(
    context: typer.Context,
    model: opt.ModelArgument = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="method, method:option=value,... or several joined by +; may be given several times. One that takes a "
            "scale and is given none is tried at every one of --scales. none and sliding_window are always measured.",
            show_default=" ".join(DEFAULT_PATCHES),
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    target_length: tail.TargetLength = None,
    scales: Annotated[
        str | None,
        typer.Option(
            metavar="S,S,...",
            help="Scales to try, e.g. 2,4,8. Default: target length / original length, and twice that.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    max_regression: tail.MaxRegression = None,
    tail_tokens: tail.TailTokens = 0,
    windows_per_document: tail.WindowsPerDocument = 1,
    first_documents: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            help="Documents of the first round; every round after it has twice as many, the last one all.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = 5,
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
    """Find the method and scale that read long documents best, by successive halving.

    Every method at every scale is measured on a few documents, the better half on twice as many, and so on: tail
    perplexity at the target length, and what short texts pay. The best one is written as a recipe for load_patch. A
    run that was interrupted goes on where it was when the same command is given again.
    """
    from hf_posenc.evaluation.candidates import original_length
    from hf_posenc.evaluation.processes import current_shard
    from hf_posenc.evaluation.sweep import report
    from hf_posenc.evaluation.sweep.run import sweep as run_sweep
    from hf_posenc.evaluation.sweep.run import work
    from hf_posenc.evaluation.sweep.trials import crossed, parse_scales, tried

    place = current_shard(shard)
    specs, wanted = patch or DEFAULT_PATCHES, None if scales is None else parse_scales(scales)
    # refuses what cannot be read before a model is loaded
    candidates = crossed(specs, wanted or (2.0,))
    with_plot = inp.decide_plot(plot)
    if not dry_run:
        inp.check_output(output)
    source, origin = inp.source_of(
        text, dataset, config, split, column, streaming, tokenized, token_dtype
    )
    session = open_session(
        model, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map, attn=attn
    )
    candidates = tried(session.model, candidates)
    original = original_length(session.model, [candidate for candidate, _ in candidates])
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
    if wanted is None:
        candidates = tried(session.model, crossed(specs, (settings.scale, 2 * settings.scale)))
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
        total[0], everything = work(meter, candidates, first_documents)
        if dry_run:
            saved = f" instead of {everything:,} for everything on every document"
            out().print(f"{total[0]:,} tokens{saved}.", markup=False)
            return
        result = run_sweep(
            meter,
            candidates,
            settings,
            about=inputs.about,
            skipped=inputs.skipped,
            first_documents=first_documents,
        )
    if place.index:
        return
    problems = report.problems(result.rows)
    table, lines = report.sweep_table(result), report.sweep_lines(result)
    tail.finish(result, table, lines, problems, output, with_plot)
    if result.winner is not None:
        out().print(f"Or: {result.trial(result.winner).call}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the subcommands of this file."""
    app.command("sweep", cls=Remembers)(sweep)
    app.command("search", cls=Remembers)(search)
