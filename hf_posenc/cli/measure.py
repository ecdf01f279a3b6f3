"""The commands that measure, a function each, from `hf-posenc perplexity` to `selftest`; `report`, their page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli.console import print_error, print_items, print_json, print_note, print_warning
from hf_posenc.cli.frame import (
    Frame,
    check_checkpoint,
    check_device,
    check_methods,
    check_model,
    print_cost,
)
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import load_config, open_session, open_sizes
from hf_posenc.evaluation.options import (
    DOCUMENTS,
    PERPLEXITY_METHODS,
    RETRIEVAL_METHODS,
    SWEEP_METHODS,
    BenchOptions,
    DocumentOptions,
    ExtendOptions,
    ModelOptions,
    PerplexityOptions,
    RetrievalOptions,
    RunOptions,
    SearchSettings,
    SelftestOptions,
    SweepOptions,
    TailOptions,
    refuse_others,
)

if TYPE_CHECKING:
    from hf_posenc.evaluation.tuning.sweep import Race

EMBEDDED_LENGTHS = (256, 512, 1024)
REPORT = Path("report.html")
EMBEDDED_TASKS = ("passkey", "niah_single_1")
MOST_TEXT = 2**24  # characters of a haystack that are read: some four million tokens


def perplexity(
    context: typer.Context,
    model: ModelOptions,
    documents: DocumentOptions,
    options: PerplexityOptions,
    run: RunOptions,
) -> None:
    """Measure perplexity against context length, method by method, on the same tokens.

    Without arguments: the embedded model on the held-out modules of this Python's standard library. The same command
    resumes an interrupted run.
    """
    frame = Frame(context, run, model, documents, options, PERPLEXITY_METHODS)
    from hf_posenc.evaluation.perplexity.run import prepare

    def load(name: str) -> tuple[Any, Any]:
        other = dataclasses.replace(model, model=name, tokenizer=None, attn=None, revision=None)
        return (open_sizes if run.dry_run else open_session)(other)[:2]

    job = frame.prepare(prepare, load=load)
    original, added = job.metadata["original"], options.short and options.preset is None
    if options.lengths and added and original and original < job.settings.lengths[0]:
        print_note(f"--stride or --tail-tokens needs more than the trained {original:,} tokens.")
    frame.announce(job.settings, job.metadata["skipped"])
    frame.finish(job, lambda: print_cost(job, frame.device))


def retrieval(
    context: typer.Context,
    model: ModelOptions,
    options: RetrievalOptions,
    run: RunOptions,
    haystack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Own text between the needles instead of noise: as --text of perplexity; several times.",
            rich_help_panel=DOCUMENTS,
        ),
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="Encoding of the own text.", rich_help_panel=DOCUMENTS)
    ] = DocumentOptions.encoding,
) -> None:
    """Measure what a model finds in long prompts: passkeys, RULER's tasks that need no download, facts, associations.

    Without arguments: the embedded model, in about a minute. The same command resumes an interrupted run.
    """
    from hf_posenc.evaluation.retrieval.tasks import settings_of

    lengths = options.lengths or EMBEDDED_LENGTHS
    if model.model is None:
        tasks = EMBEDDED_TASKS if options.tasks is None else options.tasks
        options = dataclasses.replace(options, lengths=lengths, tasks=tasks)
    settings = settings_of(options, lengths)
    if options.distractors != RetrievalOptions.distractors and settings.decode == "generate":
        raise PosencError(
            f"--distractors {options.distractors} is for --decode teacher-forced, and generated answers have no rank: "
            "leave it out."
        )
    text = _read(haystack or [], encoding)
    frame = Frame(context, run, model, None, options, RETRIEVAL_METHODS)
    from hf_posenc.evaluation.retrieval.run import prepare

    job = frame.prepare(prepare, haystack=text, paths=haystack or ())
    frame.finish(job, lambda: print_cost(job, frame.device))


def _read(paths: list[str], encoding: str) -> str | None:
    """Return the user's own text, of all files one after the other, up to `MOST_TEXT`."""
    from hf_posenc.evaluation.documents import Document, LongDocument, Skipped
    from hf_posenc.evaluation.documents.source import check_readable, refuse_ignored, source_of

    options = DocumentOptions(text=paths, encoding=encoding)
    source, text = source_of(options), ""
    refuse_ignored(options)
    check_readable(source, paths)
    for entry in source.read() if paths else ():
        if isinstance(entry, Document | LongDocument):
            for piece in entry.chunks():
                text += piece
                if len(text) >= MOST_TEXT:
                    print_warning(f"the haystack ends after {MOST_TEXT:,} characters")
                    return text[:MOST_TEXT]
            text += "\n"
        elif isinstance(entry, Skipped):
            print_warning(f"skipped {entry.name}: {entry.reason}")
    return text if paths else None


def bench(
    context: typer.Context,
    model: ModelOptions,
    documents: DocumentOptions,
    options: BenchOptions,
    run: RunOptions,
) -> None:
    """Measure methods against each other: perplexity, retrieval, tokens per second, peak memory.

    Without arguments: the embedded model on the held-out modules of this Python's standard library. The weights are
    loaded once, every document is tokenized once. The same command resumes an interrupted run. Writes bench.json,
    bench.csv, bench_retrieval.csv, table.md, curve.png and heatmap.png.

    --suite gpu measures a device instead, without weights and documents: the attention of every method, and a whole
    model. MODEL then gives the sizes alone. Writes gpu.json, gpu.csv and gpu.md.
    """
    from hf_posenc.evaluation.retrieval.tasks import get_task
    from hf_posenc.evaluation.suites import GPU, get_suite

    if options.suite == GPU:
        _bench_gpu(context, run, model, documents, options)
        return
    suite = get_suite(options.suite)
    for task in options.tasks or ():
        get_task(task)
    frame = Frame(context, run, model, documents, options, suite.methods)
    from hf_posenc.evaluation.bench import prepare

    job = frame.prepare(prepare)
    frame.announce(job.perplexity.settings, job.perplexity.metadata["skipped"])

    def print_costs() -> None:
        parts: dict[str, Any] = {
            "retrieval": job.shared.get("retrieval"),
            "timed prefill, warm-ups included": job.speed,
        }
        tokens = {name: part.forwarded for name, part in parts.items() if part is not None}
        print_cost(job.perplexity, frame.device, tokens=tokens)
        print_items(*(f"{name}: {count:,} tokens" for name, count in tokens.items()))

    frame.finish(job, print_costs)


def _bench_gpu(
    context: typer.Context,
    output: RunOptions,
    model: ModelOptions,
    documents: DocumentOptions,
    options: BenchOptions,
) -> None:
    if output.dry_run:
        raise PosencError("--dry-run has no meaning for --suite gpu: --budget limits its time.")
    check_model(dataclasses.replace(model, model=None))  # no weights, no tokenizer
    folder = model.model and check_checkpoint(model.model, model.revision)
    check_methods(options.methods)
    refuse_others(documents, ())
    refuse_others(model, ("model", "revision", "device", "dtype"))
    frame = Frame(context, output)
    from hf_posenc.evaluation.device.run import GpuRun

    config = load_config(folder, revision=model.revision) if folder else None
    about: dict[str, Any] = {"name": model.model, "command": frame.command}
    run = GpuRun(options, config, device=model.device, dtype=model.dtype, **about)
    frame.finish(run, lambda: None)


def sweep(
    context: typer.Context,
    model: ModelOptions,
    documents: DocumentOptions,
    options: SweepOptions,
    run: RunOptions,
) -> None:
    """Find the method and scale that read long documents best, by successive halving.

    Every method at every scale is measured on a few documents, the better half on twice as many, and so on: tail
    perplexity at the target length, and the price for short texts. The best one is written as a recipe for load_patch.
    The same command resumes an interrupted run.
    """
    from hf_posenc.evaluation.measuring.candidates import crossed

    methods = options.methods or SWEEP_METHODS
    crossed(methods, options.scales or (2.0,))  # refuse before loading
    if options.scales is not None and crossed(methods, (2.0,)) == crossed(methods, (3.0,)):
        scales = ",".join(f"{scale:g}" for scale in options.scales)
        raise PosencError(
            f"--scales {scales} is for methods without a scale of their own, and no --patch here takes one: leave it "
            "out."
        )
    frame = Frame(context, run, model, documents, options)
    from hf_posenc.evaluation.tuning.sweep import prepare_sweep

    if (result := _tune(frame, frame.prepare(prepare_sweep))) is not None:
        print_items(f"Or: {result.call(result.winner)}", wrap=False)


def search(
    context: typer.Context,
    model: ModelOptions,
    documents: DocumentOptions,
    options: TailOptions,
    settings: SearchSettings,
    run: RunOptions,
) -> None:
    """Search a factor for every pair of features, as LongRoPE does, and judge it on documents it has not read.

    The search of LongRoPE (algorithm 1); the best list is written as a longrope recipe for load_patch, and
    advised if it beats PI, NTK and YaRN on those documents. The same command resumes an interrupted search.
    """
    frame = Frame(context, run, model, documents, options)
    from hf_posenc.evaluation.tuning.search import prepare_search

    _tune(frame, frame.prepare(prepare_search, settings))


def _tune(frame: Frame, job: Race[Any]) -> Any:
    """Run a sweep or a search, print it, and write result, recipe and plot; exit with status 1 without a recipe."""
    frame.announce(job.settings, job.whole.metadata["skipped"])
    if (result := frame.measure(job)) is None:
        return None
    frame.present(result)
    for line in result.problems():
        print_warning(line)
    if result.recipe is None:
        print_error("There is no winner, and so no recipe.")
        raise typer.Exit(1)
    recipe = str(frame.output / f"{result.kind}_recipe.json")
    line = f"Use it: hf_posenc.load_patch(model, {recipe!r})"
    if result.kept is not None:
        call = result.call(result.kept.label)
        line = f"Use it: {call}\n{recipe} has the factors found, which are not shown to be better."
    print_items(line, wrap=False)
    return result


def extend(
    context: typer.Context,
    model: ModelOptions,
    documents: DocumentOptions,
    options: ExtendOptions,
    run: RunOptions,
) -> None:
    """Extend a model to a longer context and prove it, or say not to.

    Chooses a method on one half of the documents and judges it on the other: it must not lose to truncation, must find
    passkeys beyond the original length, and must leave short texts alone. Then the patched model is saved in --output,
    with card and recipe. Without arguments: the embedded model at four times its length. The same command
    resumes an interrupted run.
    """
    frame = Frame(context, run, model, documents, options)
    from hf_posenc.evaluation.extend import prepare, write_page

    job = frame.prepare(prepare)
    job.say = print_note
    frame.announce(job.whole.settings, job.whole.metadata["skipped"])
    if (result := frame.measure(job)) is not None:
        frame.present(result)
        print_note(f"Wrote {write_page(frame.output)}")


def selftest(
    options: SelftestOptions,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Write all findings there as JSON.")
    ] = None,
) -> None:
    """Check every attention backend on a device against float64, and time every method beside plain attention.

    The last lines say which methods are fast in a prefill, in a step and in training, which are right but slow, and
    which backends failed their check. The exit status is 1 if one did.
    FILE is what a bug report needs.
    """
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise PosencError(f"{file} cannot be written: give a file in a folder that exists.")
    check_device(options.device)
    from hf_posenc.evaluation.device.selftest import selftest as run

    result = run(options)
    if file is not None:
        result.write_json(file)
    if not print_json(result.to_dict()):
        versions = (f"{name}: {value or 'none'}" for name, value in result.environment.items())
        print_items(*versions, *result.tables(), *result.notes())
        if result.device == "cpu":
            print_items("Host waits, graphs and memory are not measured on a CPU.")
        print_items(*(f"failed: {line}" for line in result.problems()), style="red", wrap=False)
        print_items(f"Took {result.seconds:.0f} s.", result.summary, wrap=False)
    if file is not None:
        print_note(f"Wrote {file}.")
    if not result.passed:
        raise typer.Exit(1)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Output folders of measuring commands, folders of such folders, or result files.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="The page that is written.")
    ] = REPORT,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The page's heading.")] = None,
) -> None:
    """Put the results of many runs and machines into one HTML page: tables, plots, settings, how to do it again.

    Needs no model and no network. The page loads nothing and opens from a file. Every result has a section of its own.
    Unfinished runs are named.
    """
    if (absent := next((path for path in runs if not path.exists()), None)) is not None:
        raise PosencError(f"There is no path {absent}. Give the --output folder of a run.")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise PosencError(f"{output} cannot be written: give a file in a folder that exists.")
    if output.is_file() and output.suffix.lower() not in (".html", ".htm"):
        raise PosencError(f"{output} is there and no page: give another name, as {REPORT}.")
    from hf_posenc.evaluation import plots
    from hf_posenc.evaluation.page import TITLE, collect, render
    from hf_posenc.files import write_atomically

    collection = collect(runs)
    for remark in collection.remarks:
        print_warning(remark)
    if not plots.available():
        print_warning("no plots: they need matplotlib (pip install 'hf-posenc[plot]').")
    write_atomically(output, render(collection, title=title or TITLE))
    count = len(collection.sources)
    results = [{"name": source.name, "kind": source.kind} for source in collection.files]
    print_json({"page": str(output), "results": results, "remarks": collection.remarks})
    print_note(f"Wrote {output}: {count} result{'s' * (count != 1)}")
