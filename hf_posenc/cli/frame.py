"""The course of a command that measures: its words, share, costs, progress, other processes, files, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from hf_posenc.cli.console import (
    err,
    print_error,
    print_heading,
    print_items,
    print_json,
    print_note,
    print_warning,
)
from hf_posenc.diagnosis import check_folder, read_json, unreadable
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import (
    ADAPTER,
    base_of,
    check_name,
    check_tokenizer,
    open_session,
    open_sizes,
)
from hf_posenc.evaluation.options import (
    BenchOptions,
    DocumentOptions,
    ModelOptions,
    PerplexityOptions,
    ProtocolOptions,
    RunOptions,
)
from hf_posenc.files import disk_errors, finite
from hf_posenc.gguf_file import find_gguf, read_header

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Skipped
    from hf_posenc.evaluation.grid import Result
    from hf_posenc.evaluation.measuring.execute import Progress
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.run import PerplexityRun
    from hf_posenc.evaluation.retrieval.run import RetrievalRun

# PyTorch's own devices; a package that adds one is found by its entry point, and its names are checked by PyTorch.
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|mtia|xla|ipu|maia|vulkan)(:\d+)?")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "meta")

PreparedT = TypeVar("PreparedT")
SHOWN_SKIPPED = 5
GIB = 2**30
ANSWER = 64  # tokens of an answer, in the estimate of a retrieval's cost


# Words of a command, checked before torch is imported: names, numbers, files and folders.


def check(
    options: Any, model: ModelOptions, documents: DocumentOptions | None, run: RunOptions
) -> None:
    """Check the words of a command that measures: methods, model, protocol and documents."""
    check_methods(getattr(options, "methods", None), own=model.model is not None)
    check_model(model, weights=not run.dry_run)
    if isinstance(options, ProtocolOptions):
        from hf_posenc.evaluation.perplexity import protocols

        if isinstance(options, BenchOptions):
            own = (field.name for field in dataclasses.fields(ProtocolOptions))
            shared = {name: getattr(options, name) for name in ("methods", "lengths", *own)}
            options = PerplexityOptions(**shared)
        protocols.check_options(options)
        if options.longppl is not None:
            name, spec = protocols.parse_evaluator(options.longppl)
            check_methods([spec] if spec else None)
            if name != protocols.SELF:
                check_name(name)
    if documents is not None:
        from hf_posenc.evaluation.documents.source import check_readable, refuse_ignored, source_of

        folder = re.match(r"[./~]", documents.dataset or "") and documents.dataset
        if folder and not Path(folder).exists():
            raise PosencError(f"There is no folder {folder}. Give --dataset a hub name or folder.")
        refuse_ignored(documents)
        check_readable(source_of(documents), documents.text or ())


def check_model(options: ModelOptions, *, weights: bool = False) -> None:
    """Refuse a model, a tokenizer, a number format or a device that is not there, and weights that are damaged."""
    device, device_map = options.device, options.device_map
    if device is not None and device_map not in (None, "meta"):
        raise PosencError("--device and --device-map exclude each other: give one of them.")
    check_device(device)
    if device_map not in _MAPS:
        check_device(device_map, f"--device-map is {', '.join(_MAPS)} or a device.")
    # a kernel of the hub has a slash
    attn = "" if options.trust_remote_code else options.attn or ""
    if attn.isidentifier() and not _named("modeling_utils.py", attn):
        raise PosencError(
            f"--attn {attn}: transformers has no such attention. Give sdpa, eager or flash_attention_2."
        )
    if options.model is not None:
        check_checkpoint(options.model, options.revision)
    if options.tokenizer is not None:
        check_name(options.tokenizer, given="tokenizer")
    if (source := options.tokenizer or options.model) and not options.trust_remote_code:
        check_tokenizer(source)
    if not weights or options.model is None or options.trust_remote_code:
        return
    folder = Path(options.model).expanduser()
    if (folder / ADAPTER).is_file():  # `check_checkpoint` has read it
        folder = Path(read_json(folder / ADAPTER, folder)["base_model_name_or_path"])
    if (damage := unreadable(folder)) is not None:
        raise PosencError(
            f"The model {folder} cannot be loaded: {damage.rstrip('.')}. --dry-run reads no weights."
        )


def check_checkpoint(name: str, revision: str | None = None) -> str:
    """Return the name of a model as `check_name`; check its config or header too, and of an adapter the base model."""
    name = check_name(name, revision)
    folder, gguf = Path(name), find_gguf(name)
    if gguf is not None:
        read_header(gguf)
    elif (folder / ADAPTER).is_file():
        check_checkpoint(*base_of(folder / ADAPTER, name))
    elif folder.is_dir():
        check_folder(folder, name)
        values = read_json(folder / "config.json", name)
        kind = values.get("model_type")
        if isinstance(kind, str) and "auto_map" not in values and not _named("models/auto", kind):
            raise PosencError(
                f"The config.json of {name} cannot be read: The checkpoint you are trying to load has model type "
                f"`{kind}`, and transformers {metadata.version('transformers')} does not have it. Correct it there, "
                "or install a newer version."
            )
    return name


def check_device(name: str | None, also: str = "") -> None:
    """Refuse the name of a device that PyTorch does not have."""
    if name == "meta":
        raise PosencError("The device 'meta' holds no weights: give cpu, or an accelerator.")
    if name is None or _DEVICE.fullmatch(name) or metadata.entry_points(group="torch.backends"):
        return
    raise PosencError(
        f"The device {name!r} cannot be used: PyTorch has none of this name. Give cpu, cuda or cuda:1. {also}".rstrip()
    )


def _named(place: str, name: str) -> bool:
    """Return whether a file of the source of transformers, or one of a folder, contains a name in quotes."""
    if (spec := importlib.util.find_spec("transformers")) is None or spec.origin is None:
        return True
    path = Path(spec.origin).parent / place
    files = path.glob("*auto*.py") if path.is_dir() else (path,)
    return any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)


def check_methods(specs: Sequence[str] | None, *, own: bool = True) -> None:
    """Refuse unknown methods and options, and values that a method refuses on every model, as `check_values`."""
    if not specs:  # nothing to check, and no reason to import all methods
        return
    from hf_posenc.evaluation.measuring.candidates import parse_candidates

    for candidate in parse_candidates(specs):
        candidate.check_values(own=own)


# The course.


class Frame:
    """One run of a command that measures. Refuses wrong words, share or output before a model is loaded.

    Without a `model`, the command has checked its words itself, and prepares its measurement.

    Attributes:
        shard: This process's place among those of the run.
        output: Folder of the results.
        plots: Draw the plots.
        methods: Methods that are measured by default, unless the model carries a patch.
        command: The command line that gives the same result again.
    """

    def __init__(
        self,
        context: typer.Context,
        run: RunOptions,
        model: ModelOptions | None = None,
        documents: DocumentOptions | None = None,
        options: Any = None,
        methods: Sequence[str] = (),
    ) -> None:
        from hf_posenc.evaluation.measuring.store import current_shard
        from hf_posenc.evaluation.plots import available

        if model is not None:
            filled = {"methods": options.methods or methods} if methods else {}
            check(dataclasses.replace(options, **filled), model, documents, run)
        self._model, self._documents, self._options = model, documents, options
        self._dry_run = run.dry_run
        self.shard, self.output = current_shard(run.shard), run.output
        if run.plot and not available():
            raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
        self.plots = available() if run.plot is None else run.plot
        if not self._dry_run:
            if self.output.is_file():
                raise PosencError(f"--output {self.output} is a file: give a folder.")
            with disk_errors(f"--output {self.output} cannot be written to"):
                self.output.mkdir(parents=True, exist_ok=True)
        self.methods, self.command = methods, context.obj

    def prepare(self, prepare: Callable[..., PreparedT], *settings: Any, **more: Any) -> PreparedT:
        """Load the model, and prepare a measurement of it; show the document that is being read."""
        from rich.markup import escape

        from hf_posenc.evaluation.device import device_of
        from hf_posenc.evaluation.documents.source import source_of
        from hf_posenc.patch.patching import get_patch

        model, options = self._model, self._options
        assert model is not None
        source = None if self._documents is None else source_of(self._documents)
        loaded, tokenizer, name = (open_sizes if self._dry_run else open_session)(model)
        self.device = device_of(model.device)
        # A model with a patch is measured as it is.
        if self.methods and not options.methods and get_patch(loaded) is None:
            options = dataclasses.replace(options, methods=self._possible(loaded))
        more |= {"name": name, "command": self.command}
        if source is None:
            return prepare(loaded, tokenizer, options, *settings, **more)
        console = err()
        with contextlib.ExitStack() as stack:
            if console.is_terminal and not self.shard.index:
                status = stack.enter_context(console.status("Reading documents"))
                source = dataclasses.replace(
                    source, seen=lambda name: status.update(f"Reading {escape(name)}")
                )
            return prepare(loaded, tokenizer, source, options, *settings, **more)

    def _possible(self, model: Any) -> list[str]:
        """Return the default methods that a model can take; print which of them it cannot."""
        from hf_posenc.evaluation.measuring.candidates import checked_candidates

        reasons = dict[str, PosencError]()
        for spec in self.methods:
            try:
                with contextlib.suppress(NotImplementedError):  # no weights, as is said later
                    checked_candidates(model, [spec])
            except PosencError as error:
                reasons[spec] = error
        if reasons and not self.shard.index:
            print_warning(f"not measured: {', '.join(reasons)}. {next(iter(reasons.values()))}")
        return [spec for spec in self.methods if spec not in reasons]

    def announce(self, settings: Settings, skipped: Sequence[Skipped]) -> None:
        """Print, before the run, the documents that it leaves out and the tokens that it scores."""
        if self.shard.index:
            return
        for entry in skipped[:SHOWN_SKIPPED]:
            print_warning(f"skipped {entry.name}: {entry.reason}")
        if len(skipped) > SHOWN_SKIPPED:
            print_warning(f"skipped {len(skipped) - SHOWN_SKIPPED} more documents; see the JSON")
        if "tail" in settings.protocols:
            _print_dim(
                f"tail: the last {settings.tail_tokens:,} tokens of each document are scored."
            )

    def measure(self, job: Any, print_cost: Callable[[], None] | None = None) -> Any:
        """Measure this process's share; with `--dry-run`, print the cost instead, by default the job's `estimate`.

        The result is `None` where nothing was measured, or where another process reports it.
        """
        if self._dry_run and print_cost is not None:
            print_cost()
        elif self._dry_run:
            values = job.estimate(self.device)
            print_json(values)
            print_items(values["cost"])
        if self._dry_run:
            return None
        from hf_posenc.evaluation.measuring.execute import RESUMED

        found = left = 0  # of the parts of the job, until one of them has something to measure

        def resumed(stored: int, todo: int) -> None:
            nonlocal found, left
            if not left:
                found, left = found + stored, todo
                if todo:
                    _report_resumed(found, todo)

        def waiting(count: int) -> None:
            _print_dim(
                f"Waiting for processes with the same command and --output: {count:,} parts are still missing."
            )

        token = RESUMED.set(resumed)
        try:
            with self._progress() as progress:
                result = job.run(self.output, self.shard, progress, waiting)
        except KeyboardInterrupt:
            _print_dim("The same command resumes from the records.")
            raise
        finally:
            RESUMED.reset(token)
        if not left:
            _report_resumed(found, 0)
        if result is None and job.missing and not self.shard.launched:
            print_json({"shard": self.shard.index + 1, "missing": job.missing, "parts": job.total})
            print_note(
                f"Share {self.shard.index + 1} of {self.shard.count} is done; {job.missing:,} of {job.total:,} parts "
                "are the others'. The last process prints the result, as does the same command without --shard."
            )
        return result

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        """Show what is measured and the time left; gives the function that is called after every forward."""
        from rich import progress
        from rich.markup import escape

        console = err()
        columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
        hidden = self.shard.index > 0 or not console.is_terminal
        # a long memory: methods and lengths differ in the operations that they do in a second
        with progress.Progress(
            *columns, console=console, disable=hidden, transient=True, speed_estimate_period=600
        ) as bars:
            task = bars.add_task("starting", total=None)

            def report(label: str, done: int, total: int) -> None:
                # what is in the records took no time
                show = bars.reset if bars.tasks[0].total is None else bars.update
                show(task, total=total, completed=done, description=escape(label) or None)

            yield report

    def finish(self, job: Any, print_cost: Callable[[], None]) -> None:
        """Measure and present the result; exit with status 1 where a number is missing."""
        if (result := self.measure(job, print_cost)) is None:
            return
        self.present(result)
        problems = list(result.problems())
        for line in problems:
            print_error(line)
        if problems:
            raise typer.Exit(1)

    def present(self, result: Result) -> None:
        """Write the files of a result; print it under its model."""
        from hf_posenc.evaluation.plots import available

        model = result.measured_model
        kept = _keep_other_run(result, self.output)
        names = result.write(self.output, plots=self.plots)
        print_json(result.to_dict())
        size = f"{model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']}"
        where = f"on {model['device']}, {model['attention']} attention"
        print_items("")
        print_heading(str(model["name"]), f"{model['class']}, {size} {where}\n")
        blocks = [*result.tables(), *result.notes()], list(result.guide()), list(result.findings())
        print_items(*(line for block in blocks if block for line in (*block, "")))
        print_note(f"Wrote {', '.join(names)} to {self.output}")
        if kept is not None:
            print_note(f"The {result.kind}.json of another run, which was there, is kept in {kept}")
        if not available():
            print_note("No plot: it needs matplotlib (pip install 'hf-posenc[plot]').")


def _keep_other_run(result: Result, folder: Path) -> Path | None:
    """Move the result of another run to a folder of its own, unless the new one has all its records."""
    if not (path := folder / f"{result.kind}.json").exists():
        return None

    def records(values: dict[str, Any]) -> set[str]:
        parts = [values, *(part for part in values.values() if isinstance(part, dict))]
        return {json.dumps(record) for part in parts for record in part.get("records", ())}

    # what is damaged, or of no such form, is kept
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if records(json.loads(path.read_bytes())) <= records(finite(result.to_dict())):
            return None
    numbered = (folder / f"{result.kind}-{number}" for number in itertools.count(1))
    place = next(each for each in numbered if not (each / path.name).exists())
    names = {*result.files(), *(file.name for file in folder.glob(f"{result.kind}[._]*"))}
    others = [folder / name for name in names - {path.name} if (folder / name).exists()]
    with disk_errors(f"{path} is of another run and cannot be kept", "Give another --output."):
        place.mkdir(exist_ok=True)
        for file in (*others, path):  # the last: a kill before it is repaired by the next run
            file.replace(place / file.name)
    return place


def _print_dim(line: str) -> None:
    err().print(line, style="dim")


def _report_resumed(found: int, left: int) -> None:
    """Print what is taken from the records; a sweep, a search or a benchmark has further parts after `left`."""
    if found:
        _print_dim(
            f"Items taken from the records of an earlier run: {found:,}; left to measure: {left:,}."
        )


# `--dry-run`: the cost of a run, method by method, before anything is run.


def print_cost(run: PerplexityRun | RetrievalRun, device: Any, **more: Any) -> None:
    """Print tokens, operations and peak memory of every method, and the free memory of the device of the run."""
    from hf_posenc.evaluation.grid import Grid
    from hf_posenc.evaluation.scoring.estimate import estimated
    from hf_posenc.model.weights import free_memory

    by_method = itertools.groupby(cast("list[Any]", run.items), key=lambda item: item.label)
    rows = [{"method": label} | _cost(run, list(items)) for label, items in by_method]
    forwards, tokens, flops = (
        sum(row[name] for row in rows) for name in ("forwards", "tokens", "flops")
    )
    peak, weights = max(row["peak_bytes"] for row in rows), rows[0].pop("weight_bytes")
    for row in rows[1:]:
        del row["weight_bytes"]
    seconds, takes = estimated(flops, device)
    if print_json({"cost": rows, "weight_bytes": weights, "seconds": seconds, **more}):
        return
    grid = Grid()
    grid.column("method", footer="in all")
    grid.column("forwards", numeric=True, footer=f"{forwards:,}")
    grid.column("tokens", numeric=True, footer=f"{tokens:,}")
    grid.column("FLOPs", numeric=True, footer=f"{flops:.3g}")
    grid.column("GiB at\nthe peak", numeric=True, footer=f"{peak / GIB:,.2f}")
    grid.column("of it\nlogits", numeric=True)
    grid.column("attention\nby")
    for row in rows:
        counts = (f"{row['forwards']:,}", f"{row['tokens']:,}", f"{row['flops']:.3g}")
        memory = (f"{row[name] / GIB:,.2f}" for name in ("peak_bytes", "logit_bytes"))
        by = (f"{name}{'' if checked else '?'}" for name, checked in row["attention"].items())
        grid.row(row["method"], *counts, *memory, ", ".join(by))
    if getattr(run.settings, "evaluator", None):
        takes += " What the evaluator of longppl needs comes on top."
    free = free_memory(device)
    rest = "" if free is None else f"{free / GIB:,.1f} GiB are free on {device}."
    print_items(
        grid,
        f"{weights / GIB:,.2f} GiB are the weights. {rest} A coarse estimate from the model's sizes "
        f"(docs/evaluation.md, Memory). {takes} Nothing was run.",
    )
    if not all(checked for row in rows for checked in row["attention"].values()):
        print_items(
            f"?: never checked here. The run does so first, as does hf-posenc selftest --device {device.type}."
        )


def _cost(run: PerplexityRun | RetrievalRun, items: list[Any]) -> dict[str, Any]:
    """Return the cost of the items of one method, and what computes their attention."""
    from hf_posenc.evaluation.scoring.estimate import backends, run_cost

    settings, candidate, costs = run.settings, items[0].candidate, []
    prefill = None if candidate.length_dependent else getattr(settings, "prefill", None)
    attention: ChainMap[str, bool] = ChainMap()
    by_lengths = itertools.groupby(items, key=lambda each: getattr(each, "lengths", (each.length,)))
    for lengths, group in by_lengths:
        with candidate.applied(run.model, lengths[-1]):
            cost = run_cost(
                run.model,
                [window for item in group for window in _windows(item)],
                batch=getattr(settings, "batch", 1),
                chunk=settings.chunk,
                prefill_chunk=prefill,
                full_logits=not run.scorer.replays,
            )
            attention.maps.append(backends(run.model, lengths[-1]))
        costs.append(cost)
    most = max(costs, key=lambda cost: cost.total)
    return {
        "forwards": sum(len(_windows(item)) for item in items),
        "tokens": sum(cost.tokens for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "peak_bytes": most.total,
        "logit_bytes": most.logits,
        "weight_bytes": most.weights,
        "attention": dict(attention),
    }


def _windows(item: Any) -> list[tuple[int, int]]:
    """Return the tokens of every forward of an item and how many of them are scored; of a prompt, its answer."""
    if hasattr(item, "windows"):
        return [(w.forwarded, w.tokens - w.first_scored) for w in item.windows]
    return [(item.length, min(item.length, ANSWER))]
