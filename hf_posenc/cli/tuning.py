"""`hf-posenc sweep`: which method, at which scale, for these documents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import options as inp
from hf_posenc.cli import options as opt
from hf_posenc.cli.console import err, out, print_error, print_warning
from hf_posenc.cli.loading import Remembers, command_line, open_session
from hf_posenc.cli.presentation import (
    announce,
    progress_bar,
    reading,
    say_written,
    show_model,
    show_tables,
)
from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hf_posenc.cli.loading import Session
    from hf_posenc.evaluation.documents import Entry, Skipped, TokenCache, TokenizedDocument
    from hf_posenc.evaluation.measuring.store import Shard
    from hf_posenc.evaluation.tuning.objective import Meter, TailSettings
    from hf_posenc.evaluation.tuning.results import TuningResult


# What `sweep` and `search` share: documents for a target length, the records, and what is shown and written.


TargetLength = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="The length to do well at, in tokens, e.g. 16k. Default: four times the original length.",
        rich_help_panel=opt.MEASURED,
    ),
]
MaxRegression = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="How much the perplexity of short texts may grow, e.g. 0.02 for 2 %. Default: any.",
        rich_help_panel=opt.MEASURED,
    ),
]
TailTokens = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=0,
        help="Tokens scored at the end of a window. Default: 1024, at most half of the original length.",
        show_default=False,
        rich_help_panel=opt.MEASURED,
    ),
]
WindowsPerDocument = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Tails scored in each document, evenly spaced.",
        rich_help_panel=opt.MEASURED,
    ),
]


@dataclass(frozen=True)
class Inputs:
    """A model and documents, ready to be measured.

    Attributes:
        session: The model and its tokenizer.
        settings: The objective.
        special: Token ids in front of every window.
        documents: Those that are used.
        skipped: Those that are not.
        about: What the result says of model, source, versions and command.
    """

    session: Session
    settings: TailSettings
    special: Sequence[int]
    documents: list[TokenizedDocument]
    skipped: list[Skipped]
    about: dict[str, Any]


def tail_settings(original: int | None, target: str | None, **given: Any) -> TailSettings:
    """The objective; without a target, four times the original length.

    Raises:
        PosencError: The original length is not known, or numbers do not go together.
    """
    from hf_posenc.evaluation.perplexity.protocols import parse_length
    from hf_posenc.evaluation.tuning.objective import TailSettings

    if original is None:
        raise PosencError(
            "The model's config names no context length that it was trained on; give it with a method, as in "
            "--patch yarn:original_max_position_embeddings=4096."
        )
    length = 4 * original if target is None else parse_length(target, "--target-length")
    return TailSettings(original, length, **given)


def read_inputs(
    session: Session,
    settings: TailSettings,
    place: Shard,
    source: Iterable[Entry] | None,
    origin: dict[str, Any],
    *,
    bos: str | None,
    limit: int | None,
    max_doc_tokens: int | None,
    cache: TokenCache | None,
    demo: int,
    command: str,
) -> Inputs:
    """Reads documents of at least the target length.

    Args:
        session: The model and its tokenizer.
        settings: The objective.
        place: This process's place.
        source: A reader; `None` for the held-out modules.
        origin: What the result says of it.
        bos: Policy for special tokens.
        limit: Number of usable documents.
        max_doc_tokens: Documents are cut to so many tokens.
        cache: Where their tokens are kept from one run to the next.
        demo: The limit for the held-out modules, where none is given.
        command: What the result says of how it was made.

    Raises:
        PosencError: No document can be used, or the tokenizer is another model's.
    """
    from hf_posenc.evaluation.documents import (
        EMBEDDED_SOURCE,
        load_documents,
        read_embedded,
        special_prefix,
    )
    from hf_posenc.evaluation.measuring.identity import describe_model, environment

    words, policy = session.tokenizer, bos or "auto"
    special = special_prefix(words, policy)
    if source is None:
        source, origin = read_embedded(), EMBEDDED_SOURCE
        limit = limit or demo
        max_doc_tokens = max_doc_tokens or settings.target * settings.windows_per_document
    needed = settings.target - len(special)
    with reading(place) as seen:
        usable, skipped = load_documents(
            source,
            words,
            min_tokens=needed,
            max_tokens=max_doc_tokens,
            limit=limit,
            seen=seen,
            cache=cache,
        )
    about = {
        "model": describe_model(session.name, session.model, words, special, policy),
        "source": {**origin, "limit": limit, "max_doc_tokens": max_doc_tokens},
        "environment": environment(),
        "command": command,
    }
    return Inputs(session, settings, special, usable, skipped, about)


@contextlib.contextmanager
def metering(
    inputs: Inputs, output: Path | None, place: Shard
) -> Iterator[tuple[Meter, list[int]]]:
    """A meter over the records of the output folder, with its progress shown; without a folder it keeps nothing.

    Gives the meter, and a list of one number: the tokens that the bar ends at, which the caller sets.
    """
    from hf_posenc.evaluation.measuring.store import Memory, Store
    from hf_posenc.evaluation.tuning.objective import Meter

    decisive = {
        "kind": "tail",
        "model": inputs.about["model"],
        "settings": inputs.settings.decisive,
        "environment": inputs.about["environment"],
    }
    total = [1]

    def advance(label: str, tokens: int) -> None:
        done = tokens * place.count  # the others do as much meanwhile
        show(label, min(done, total[0]), total[0])

    def waiting(count: int) -> None:
        err().print(
            f"Waiting for {count:,} measurement{'s' * (count > 1)} of other processes.", style="dim"
        )

    records = contextlib.nullcontext(Memory()) if output is None else Store(output, decisive, place)
    with records as store:
        meter = Meter(
            inputs.session.model,
            inputs.documents,
            inputs.settings.protocol,
            store,
            special=inputs.special,
            shard=place,
            progress=advance,
            waiting=waiting,
        )
        if place.index == 0:
            announce(inputs.settings.protocol, inputs.documents, inputs.skipped)
        with progress_bar(place) as show:
            yield meter, total


def finish(result: TuningResult, output: Path, with_plot: bool) -> None:
    """Print a result and write result, recipe and plot.

    Raises:
        PosencError: A file cannot be written.
        typer.Exit: Status 1 if there is no recipe, after everything has been written.
    """
    show_model(result.about["model"])
    show_tables(result)
    say_written(result.write(output, plots=with_plot), output)
    for line in result.problems():
        print_warning(line)
    if result.recipe is None:
        print_error("There is no winner, and so no recipe.")
        raise typer.Exit(1)
    recipe = str(output / f"{result.kind}_recipe.json")
    out().print(f"Use it: hf_posenc.load_patch(model, {recipe!r})", markup=False, soft_wrap=True)


# `hf-posenc search`: a factor for every pair of features, as LongRoPE searches them.


SEARCH_DEMO_DOCUMENTS = 24


def search(
    context: typer.Context,
    model: opt.ModelArgument = None,
    target_length: TargetLength = None,
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
    max_regression: MaxRegression = None,
    tail_tokens: TailTokens = 0,
    windows_per_document: WindowsPerDocument = 1,
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
    from hf_posenc.evaluation.measuring.store import current_shard
    from hf_posenc.evaluation.tuning.evolution import rope_of
    from hf_posenc.evaluation.tuning.search import SearchSettings, work
    from hf_posenc.evaluation.tuning.search import search as run_search

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
    settings = tail_settings(
        original,
        target_length,
        max_regression=max_regression,
        tail_tokens=tail_tokens,
        windows_per_document=windows_per_document,
        chunk=chunk,
        prefill=prefill_chunk,
        seed=seed,
    )
    inputs = read_inputs(
        session,
        settings,
        place,
        source,
        origin,
        bos=bos,
        limit=limit,
        max_doc_tokens=max_doc_tokens,
        cache=inp.token_cache_of(token_cache, session.tokenizer),
        demo=SEARCH_DEMO_DOCUMENTS,
        command=command_line(context),
    )
    with metering(inputs, None if dry_run else output, place) as (meter, total):
        total[0] = work(meter, settings, own)
        if dry_run:
            out().print(f"{total[0]:,} tokens for {own.budget:,} evaluations.", markup=False)
            return
        result = run_search(meter, settings, own, about=inputs.about, skipped=inputs.skipped)
    if place.index:
        return
    finish(result, output, with_plot)


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
    target_length: TargetLength = None,
    scales: Annotated[
        str | None,
        typer.Option(
            metavar="S,S,...",
            help="Scales to try, e.g. 2,4,8. Default: target length / original length, and twice that.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    max_regression: MaxRegression = None,
    tail_tokens: TailTokens = 0,
    windows_per_document: WindowsPerDocument = 1,
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
    from hf_posenc.evaluation.measuring.candidates import original_length
    from hf_posenc.evaluation.measuring.store import current_shard
    from hf_posenc.evaluation.tuning.sweep import crossed, parse_scales, tried, work
    from hf_posenc.evaluation.tuning.sweep import sweep as run_sweep

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
    settings = tail_settings(
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
    inputs = read_inputs(
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
    with metering(inputs, None if dry_run else output, place) as (meter, total):
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
    finish(result, output, with_plot)
    if result.winner is not None:
        out().print(f"Or: {result.trial(result.winner).call}", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the subcommands of this file."""
    app.command("sweep", cls=Remembers)(sweep)
    app.command("search", cls=Remembers)(search)
