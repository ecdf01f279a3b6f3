"""What `sweep` and `search` share: documents for a target length, the records, and what is shown and written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import options as opt
from hf_posenc.cli.console import err, out, print_error, print_warning
from hf_posenc.cli.presentation import (
    announce,
    progress_bar,
    reading,
    say_written,
    show_model,
)
from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from hf_posenc.cli.session import Session
    from hf_posenc.evaluation.documents import Entry, Skipped, TokenCache, TokenizedDocument
    from hf_posenc.evaluation.processes import Shard
    from hf_posenc.evaluation.sweep.meter import Meter
    from hf_posenc.evaluation.sweep.result import SweepResult
    from hf_posenc.evaluation.sweep.search_result import SearchResult
    from hf_posenc.evaluation.sweep.settings import TailSettings


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
    from hf_posenc.evaluation.protocols import parse_length
    from hf_posenc.evaluation.sweep.settings import TailSettings

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
    from hf_posenc.evaluation.identity import describe_model, environment

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
    from hf_posenc.evaluation.store import Memory, Store
    from hf_posenc.evaluation.sweep.meter import Meter

    decisive = {
        "kind": "tail",
        "model": inputs.about["model"],
        "settings": inputs.settings.decisive,
        "environment": inputs.about["environment"],
    }
    done, total = 0, [1]

    def advance(label: str, tokens: int) -> None:
        nonlocal done
        done += tokens * place.count  # the others do as much meanwhile
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


def finish(
    result: SweepResult | SearchResult,
    table: Table,
    lines: Iterable[str],
    problems: Iterable[str],
    output: Path,
    with_plot: bool,
) -> None:
    """Prints the table and what it says, and writes result, recipe and plot.

    Raises:
        PosencError: A file cannot be written.
        typer.Exit: Status 1 where there is no recipe, after everything that was measured has been written.
    """
    from hf_posenc.evaluation.files import to_json, write_atomically
    from hf_posenc.evaluation.plots import write_figure
    from hf_posenc.evaluation.sweep.recipe import recipe_text

    kind = result.to_dict()["kind"]
    show_model(result.about["model"])
    console = out()
    console.print(table)
    for line in (*lines, ""):
        console.print(line, markup=False)
    written = [f"{kind}.json"]
    write_atomically(output / written[0], to_json(result.to_dict()))
    recipe = output / f"{kind}_recipe.json"
    if result.recipe is not None:
        write_atomically(recipe, recipe_text(result.recipe))
        written.append(recipe.name)
    if with_plot:
        names = [f"{kind}.png", f"{kind}.svg"]
        write_figure(result.plot(), *(output / name for name in names))
        written += names
    say_written(written, output)
    for line in problems:
        print_warning(line)
    if result.recipe is None:
        print_error("There is no winner, and so no recipe.")
        raise typer.Exit(1)
    console.print(
        f"Use it: hf_posenc.load_patch(model, {str(recipe)!r})", markup=False, soft_wrap=True
    )
