"""`hf-posenc retrieval`: what a model finds in long prompts, method by method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import options as opt
from hf_posenc.cli.console import print_warning
from hf_posenc.cli.loading import Remembers, command_line, open_session
from hf_posenc.cli.options import check_output, decide_plot, tasks_of
from hf_posenc.cli.presentation import (
    present,
    progress_bar,
    say_unfinished,
    say_waiting,
)
from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.measuring.store import Shard
    from hf_posenc.evaluation.retrieval import RetrievalRun

# The second is the control: plain attention to as many tokens as the model was trained at.
DEFAULT_PATCHES = ("none", "sliding_window", "pi", "ntk", "yarn", "dynamic_yarn", "rerope")
DEMO_LENGTHS = (256, 512, 1024)
DEMO_TASKS = "passkey,niah_single_1"
MOST_TEXT = 2**24  # characters of a haystack that are read: some four million tokens
NAME = "retrieval"


def retrieval(
    context: typer.Context,
    model: opt.ModelArgument = None,
    patch: opt.PatchOption = None,
    lengths: opt.LengthsOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Some of passkey, niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe; or all.",
            show_default="passkey, niah_single_1 and niah_multikey_2, the first two for the embedded model",
            rich_help_panel=opt.MEASURED,
        ),
    ] = None,
    depths: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Depths of the needle, evenly from the front to the back of the prompt.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = 5,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Samples at every length and depth.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = 4,
    distractors: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Wrong answers that the right one is ranked among; 0 for no rank.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = 10,
    decode: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="teacher-forced (one forward per sample; the same as greedy exact match) or generate.",
            rich_help_panel=opt.MEASURED,
        ),
    ] = "teacher-forced",
    bos: opt.BosOption = None,
    seed: opt.SeedOption = 0,
    haystack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Own text between the needles instead of noise: files, folders or glob patterns; several times.",
            rich_help_panel=opt.DOCUMENTS,
        ),
    ] = None,
    tokenizer: opt.TokenizerOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = None,
    device_map: opt.DeviceMapOption = None,
    attn: opt.AttnOption = None,
    output: opt.OutputOption = Path("out"),
    plot: opt.PlotOption = None,
    shard: opt.ShardOption = None,
) -> None:
    """Measure what a model finds in long prompts: passkeys, and RULER's tasks that need no download.

    Without arguments: the embedded model, in about a minute. A run that was interrupted goes on where it was when
    the same command is given again.
    """
    from hf_posenc.evaluation.documents import special_prefix
    from hf_posenc.evaluation.measuring.candidates import original_length, parse_candidates
    from hf_posenc.evaluation.measuring.identity import describe_model
    from hf_posenc.evaluation.measuring.store import current_shard
    from hf_posenc.evaluation.perplexity.protocols import default_lengths, parse_lengths
    from hf_posenc.evaluation.retrieval import RetrievalRun, RetrievalSettings, even_depths
    from hf_posenc.evaluation.retrieval.measuring import describe_haystack

    place = current_shard(shard)
    candidates = parse_candidates(patch or DEFAULT_PATCHES)
    wanted = parse_lengths(lengths) if lengths is not None else None
    given: dict[str, Any] = {
        "depths": even_depths(depths),
        "samples": samples,
        "distractors": distractors,
        "decode": decode,
        "seed": seed,
    }
    if tasks is not None or model is None:
        given["tasks"] = tasks_of(tasks or DEMO_TASKS)
    # what is wrong with it is said before a model is loaded
    RetrievalSettings(lengths=wanted or DEMO_LENGTHS, **given)
    with_plot = decide_plot(plot)
    check_output(output)
    text = _read(haystack) if haystack else None
    session = open_session(
        model, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map, attn=attn
    )
    live, words, policy = session.model, session.tokenizer, bos or "auto"
    candidates = [candidate.checked(live) for candidate in candidates]
    original = original_length(live, candidates)
    if wanted is None:
        wanted = DEMO_LENGTHS if session.embedded else default_lengths(original)
    special = special_prefix(words, policy)
    settings = RetrievalSettings(lengths=wanted, **given)
    run = RetrievalRun(live, words, candidates, settings, special=special, haystack=text)
    _finish(
        run,
        place,
        output,
        with_plot,
        model=describe_model(session.name, live, words, special, policy),
        haystack=describe_haystack(text, haystack or ()),
        original=original,
        command=command_line(context),
    )


def _read(paths: list[str]) -> str:
    """The user's own text, of all files one after the other, up to `MOST_TEXT`.

    Raises:
        PosencError: There is none.
    """
    from hf_posenc.evaluation.documents import Document, Skipped, TokenizedDocument, read_paths

    text, reasons = "", []
    for entry in read_paths(paths):
        if isinstance(entry, (Skipped, TokenizedDocument)):
            why = entry.reason if isinstance(entry, Skipped) else "token ids and no text"
            reasons.append(f"{entry.name}: {why}")
            print_warning(f"skipped {reasons[-1]}")
            continue
        pieces = [entry.text] if isinstance(entry, Document) else entry.chunks()
        for piece in pieces:
            text += piece
            if len(text) >= MOST_TEXT:
                return text[:MOST_TEXT]
        text += "\n"
    if not text.strip():
        first = f" ({reasons[0]})" if reasons else ""
        raise PosencError(f"--haystack {' '.join(paths)} has no text{first}: give files of text.")
    return text


def _finish(run: RetrievalRun, shard: Shard, output: Path, with_plot: bool, **known: Any) -> None:
    """Measures this process's share; the process that sees the whole prints the tables and writes the files."""
    from hf_posenc.evaluation.measuring.execute import execute, wait_for_all, write_timings
    from hf_posenc.evaluation.retrieval import measuring

    with measuring.open_store(output, run, known, shard) as store:
        with progress_bar(shard) as progress:
            execute(run, store, shard, progress)
        if not wait_for_all(run, store, shard, say_waiting):
            say_unfinished(run, store, shard)
            return
        if shard.launched and shard.index:
            return
        result = measuring.result_of(run, store, **known)
        assert result is not None
        write_timings(run, store, output / "timings.json")
    present(result, result.model, output, with_plot)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command(NAME, cls=Remembers)(retrieval)
