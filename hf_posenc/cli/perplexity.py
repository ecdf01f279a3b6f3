"""`hf-posenc perplexity`: perplexity against context length, method by method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli.inputs import (
    TakesSeveral,
    check_output,
    check_vocabulary,
    decide_plot,
    source_of,
)
from hf_posenc.cli.presentation import announce, finish, progress_bar, reading

# The second is the control: plain attention to as many tokens as the model was trained at.
DEFAULT_PATCHES = (
    *("none", "sliding_window", "pi", "ntk", "ntk_mixed", "ntk_by_parts", "llama3"),
    *("yarn", "yarn:scale=16", "dynamic_ntk:scale=2", "dynamic_yarn", "rerope", "self_extend"),
)
DEMO_DOCUMENTS = 12
EMBEDDED = "hf_posenc's embedded model"
NAME = "perplexity"
_GIVEN = "Documents"
_MEASURE = "What is measured"
_MODEL = "The model"
_OUTPUT = "Output"


def perplexity(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A folder or a hub name. Default: the embedded model."
        ),
    ] = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="none, or method:option=value,... such as yarn:scale=8, or several joined by +, such as "
            "yarn:scale=4+log_n; may be given several times. Without a scale, a method that scales to a target gets "
            "length / original length, anew at every length.",
            show_default=" ".join(DEFAULT_PATCHES),
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="L,L,...",
            help="Context lengths in tokens, e.g. 512,1024,4k. Default: the original length times 1, 2, 4, 8, 16 up to "
            "4,096 tokens, and three of them at least.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(metavar="NAMES", help="prefix, tail, or both.", rich_help_panel=_MEASURE)
    ] = "prefix,tail",
    tail_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Tokens that `tail` scores. Default: 1024, at most half of the shortest length.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    windows_per_document: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="`tail` windows in each document, evenly spaced.",
            rich_help_panel=_MEASURE,
        ),
    ] = 1,
    bos: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="auto (special tokens as the tokenizer puts them in front of a text), always, or never.",
            rich_help_panel=_MEASURE,
        ),
    ] = "auto",
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Seed of the bootstrap.", rich_help_panel=_MEASURE),
    ] = 0,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Text files (UTF-8), folders or glob patterns; may be given several times, or with several values.",
            show_default="the held-out modules of this Python's standard library",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A dataset of the datasets library: hub name or folder.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The dataset's configuration.", rich_help_panel=_GIVEN),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="The dataset's split.", rich_help_panel=_GIVEN)
    ] = "test",
    column: Annotated[
        str,
        typer.Option(metavar="NAME", help="The dataset's column of text.", rich_help_panel=_GIVEN),
    ] = "text",
    streaming: Annotated[
        bool,
        typer.Option(
            help="Read the dataset row by row, without downloading it.", rich_help_panel=_GIVEN
        ),
    ] = True,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Stop at so many usable documents.",
            show_default=f"{DEMO_DOCUMENTS} of the held-out modules, else all",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    max_doc_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Cut every document to so many tokens first.",
            rich_help_panel=_GIVEN,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: the model's.", rich_help_panel=_MODEL),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto (the checkpoint's own, float32 on a CPU), float32, bfloat16, float16, float64.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="cpu, cuda, cuda:1, ... Default: a GPU where there is one.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="MAP", help="auto spreads a large model over all GPUs.", rich_help_panel=_MODEL
        ),
    ] = None,
    attn: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="sdpa, eager, flash_attention_2, ... Default: the model's.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens whose logits are held at a time. Default: by the vocabulary.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for perplexity.json, .csv, .png and .svg.",
            rich_help_panel=_OUTPUT,
        ),
    ] = Path("out"),
    plot: Annotated[
        bool | None,
        typer.Option(
            help="Draw the plot. Default: where matplotlib is installed.", rich_help_panel=_OUTPUT
        ),
    ] = None,
) -> None:
    """Measure perplexity against context length, method by method, on the same tokens.

    Without arguments: the embedded model on the held-out modules of this Python's standard library.
    """
    from hf_posenc.cli import loading
    from hf_posenc.evaluation.candidates import original_length, parse_candidates
    from hf_posenc.evaluation.documents import load_documents, read_embedded, special_prefix
    from hf_posenc.evaluation.perplexity import measure
    from hf_posenc.evaluation.processes import gather, world
    from hf_posenc.evaluation.protocols import Settings, default_lengths, parse_lengths
    from hf_posenc.evaluation.result import PerplexityResult, describe_model

    rank, processes = world()
    candidates = parse_candidates(patch or DEFAULT_PATCHES)
    wanted = parse_lengths(lengths) if lengths is not None else None
    with_plot = decide_plot(plot)
    check_output(output)
    source, origin = source_of(text, dataset, config, split, column, streaming)
    if model is None:
        loading.one_thread()
    name = model or loading.embedded_model()
    words = loading.load_tokenizer(tokenizer or name)
    special = special_prefix(words, bos)
    live = loading.load_model(
        name, dtype=dtype, device=device, device_map=device_map, attention=attn
    )
    candidates = [candidate.checked(live) for candidate in candidates]
    original = original_length(live, candidates)
    settings = Settings(
        lengths=wanted or default_lengths(original),
        protocols=tuple(part.strip() for part in protocol.split(",")),
        tail_tokens=0 if tail_tokens is None else tail_tokens,
        windows_per_document=windows_per_document,
        chunk=chunk,
        seed=seed,
    )
    needed = settings.lengths[-1] - len(special)
    if source is None:
        source, origin = read_embedded(), {"kind": "held-out modules of the standard library"}
        limit, max_doc_tokens = limit or DEMO_DOCUMENTS, max_doc_tokens or needed
    with reading(rank) as seen:
        usable, skipped = load_documents(
            source, words, min_tokens=needed, max_tokens=max_doc_tokens, limit=limit, seen=seen
        )
    check_vocabulary(live, usable)
    if rank == 0:
        announce(settings, usable, skipped)
    with progress_bar(rank) as progress:
        share = measure(
            live, usable[rank::processes], candidates, settings, special=special, progress=progress
        )
    shares = gather(share)
    if shares is None:
        return
    result = PerplexityResult.merge(
        shares,
        model=describe_model(model or EMBEDDED, live, words, special, bos),
        source={**origin, "limit": limit, "max_doc_tokens": max_doc_tokens},
        settings=settings,
        original=original,
        candidates=candidates,
        documents=usable,
        skipped=skipped,
        processes=processes,
    )
    finish(result, output, with_plot)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command(NAME, cls=TakesSeveral)(perplexity)
