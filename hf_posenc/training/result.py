"""The result of a training: its log as data, the model card with its plot, the printed report, the push to the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from transformers import Trainer, TrainingArguments

from hf_posenc.engines import ENGINES, Export, export_source
from hf_posenc.engines.engine import open_source
from hf_posenc.errors import PosencError, UnsupportedModelError, one_line
from hf_posenc.evaluation.documents import Skipped, read_paths
from hf_posenc.evaluation.documents.source import refuse_ignored
from hf_posenc.evaluation.grid import to_markdown
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import environment, global_shape
from hf_posenc.evaluation.options import DocumentOptions
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import available, write_figure
from hf_posenc.files import finite, to_json, write_atomically
from hf_posenc.gguf_file import origin_of
from hf_posenc.methods import available_methods, get_method
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.training.processes import gather, whole_weights
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.scoring import before_and_after, conclusion, precision_of

LOG, CARD, PLOT = "training_log.json", "README.md", "perplexity.png"
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Markdown
)
_TEMPLATES.filters.update(thousands="{:,}".format, markdown=to_markdown)
_TAGS = ("hf_posenc", "long-context", "positional-encoding")
_PLAIN = "transformers5"
# Folders in the output folder are checkpoints, records and the training text. The pickle of the arguments holds paths,
# and the hub's token if one was given.
_NOT_PUSHED = ("*/*", ".*", "*.lock", "training_args.bin")


@dataclass(frozen=True)
class TrainingLog:
    """The log of one training.

    Attributes:
        base: The model that it began with: a hub name, or the last part of a folder's path.
        model: Class, number of parameters, and number of trained ones.
        label: The patch as reports show it; `None` without one.
        patch: The patch, from `PatchConfig.to_dict`.
        original: The context that the base was trained on, in tokens.
        extended: The context that the patch reaches, in tokens; `None` if it follows the text.
        train: `"full"`, `"lora"` or `"encoding"`.
        data: The training data: `source`, `documents`, `tokens`, `blocks`, `block_length`, `positions`,
            `target_length`, as far as known.
        run: The run: `steps`, `sequences_per_step`, `processes`, `tokens_seen`, `learning_rate`, ...
        command: The command that repeats this training, if known.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import TrainingLog
        >>> trainer = Trainer(patch_model(model, "yarn", scale=4), TrainingArguments("run", report_to=[]))
        >>> log = TrainingLog.of(trainer, base="meta-llama/Llama-2-7b-hf")  # after trainer.train()
        >>> log.label, log.original, log.extended
        ('yarn (scale 4)', 4096, 16384)
    """

    base: str
    model: Mapping[str, Any]
    label: str | None
    patch: Mapping[str, Any] | None
    original: int | None
    extended: int | None
    train: str
    data: Mapping[str, Any]
    run: Mapping[str, Any]
    log_history: list[dict[str, Any]] = field(repr=False)
    environment: Mapping[str, Any]
    command: str | None = None

    @property
    def methods(self) -> list[str]:
        parts = self.patch and (self.patch, *self.patch.get("others", ()))
        return [part["method"] for part in parts or ()]

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        *,
        base: str,
        train: str = "full",
        data: Mapping[str, Any] | None = None,
        command: str | None = None,
    ) -> TrainingLog:
        """Return the log of a Trainer after `train()`; folders and files in `base` and `data` lose their paths."""
        model: Any = trainer.model
        patch = get_patch(model)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        origin = origin_of(model.config, dtype)
        sizes = [(global_shape(each).numel(), each.requires_grad) for each in model.parameters()]
        return cls(
            base=shown_name(base),
            model={
                "class": type(unwrap(model)).__name__,
                "parameters": sum(size for size, _ in sizes),
                "trained": sum(size for size, trained in sizes if trained),
                "dtype": dtype,
                **({"weights": origin} if origin else {}),
            },
            label=None if patch is None else Candidate.installed(patch.config).label,
            patch=None if patch is None else patch.config.to_dict(),
            original=None if patch is None else patch.original_max_position_embeddings,
            extended=None if patch is None else patch.extended_length,
            train=train,
            data=_without_paths(dict(data or {})),
            run=_run(trainer),
            log_history=list(trainer.state.log_history),
            environment=environment(),
            command=command,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; a number that is not finite becomes `None`."""
        return dict(finite({"kind": "training", "format": 1, **dataclasses.asdict(self)}))

    @classmethod
    def read(cls, directory: Path) -> TrainingLog:
        values = json.loads((directory / LOG).read_text(encoding="utf-8"))
        return cls(**{entry.name: values[entry.name] for entry in dataclasses.fields(cls)})


def _run(trainer: Trainer) -> dict[str, Any]:
    arguments, state = trainer.args, trainer.state
    values = arguments.to_dict()  # names instead of enumerations
    names = ("learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed")
    seconds = [entry["train_runtime"] for entry in state.log_history if "train_runtime" in entry]
    precision = precision_of(arguments)
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps
    checkpointing = getattr(arguments, "activation_checkpointing", arguments.gradient_checkpointing)
    distributed = trainer.accelerator.distributed_type.value
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "tokens_seen": state.num_input_tokens_seen or None,
        "sequences_per_step": batch * arguments.world_size,
        "processes": arguments.world_size,
        "distributed": None if arguments.world_size == 1 else distributed,
        "device": arguments.device.type,
        "seconds": seconds[-1] if seconds else None,
        **{name: values[name] for name in names},
        "warmup_steps": arguments.get_warmup_steps(state.max_steps),
        "optimizer": values["optim"],
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "precision": None if precision is None else str(precision).removeprefix("torch."),
        "gradient_checkpointing": bool(checkpointing),
    }


def shown_name(name: str) -> str:
    """Return a hub name or other text unchanged, and the last part of a local path."""
    path = Path(name)
    local = path.is_absolute() or path.is_dir() or name.startswith((".", "~"))
    return path.expanduser().resolve().name if local else name


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(inner) for inner in value]
    return shown_name(str(value)) if isinstance(value, str | Path) else value


def published(scores: PerplexityResult) -> PerplexityResult:
    """Return scores whose documents' names lose the folders that all have in common, so that they stay different."""
    names = [str(document["name"]) for document in scores.documents]
    names += [skipped.name for skipped in scores.skipped]
    folders = [Path(name).parent for name in names if Path(name).is_absolute()]
    common = os.path.commonpath(folders) if folders else None
    shown = {n: os.path.relpath(n, common) if Path(n).is_absolute() else n for n in names}
    return dataclasses.replace(
        scores,
        model={**scores.model, "name": shown_name(str(scores.model["name"]))},
        documents=[{**each, "name": shown[each["name"]]} for each in scores.documents],
        skipped=[dataclasses.replace(each, name=shown[each.name]) for each in scores.skipped],
        records=[
            dataclasses.replace(each, document=shown[each.document]) for each in scores.records
        ],
    )


def write_card(
    directory: Path | str,
    log: TrainingLog,
    scores: PerplexityResult | None = None,
    exports: Sequence[Export] | None = None,
    *,
    licence: str | None = None,
    name: str = "PATH",
) -> Path:
    """Write a model card into a saved model's folder, with its plot and the data behind it.

    Args:
        directory: The folder.
        log: The log of the training.
        scores: The rows of `Scores`.
        exports: The exports of the folder (`hf_posenc.engines`); by default one per engine is computed.
        licence: The model's, as the hub names it, such as `apache-2.0`; by default the card names none.
        name: The name to load the model by, such as its name on the hub.

    Returns:
        The path of the card.

    Raises:
        PosencError: A file cannot be written.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import TrainingLog, write_card
        >>> trainer = Trainer(patch_model(model, "yarn", scale=4), TrainingArguments("run", report_to=[]))
        >>> model.save_pretrained("longer")
        >>> card = write_card("longer", TrainingLog.of(trainer, base="my-model"), licence="apache-2.0")
        >>> card.name
        'README.md'
    """
    directory = Path(directory)
    if exports is None:
        exports = []
        with contextlib.suppress(UnsupportedModelError):  # no rotary table, no export
            source = open_source(directory)
            exports = [export_source(source, engine) for engine in ENGINES]
    write_atomically(directory / LOG, to_json(log.to_dict()))
    if scores is not None:
        published(scores).write_json(directory / SCORES)
    saved = directory / "config.json"
    config = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    adapter = log.train == "lora"
    plain = not adapter and "withheld" not in config.get("hf_posenc", {})
    metadata = ModelCardData(
        base_model=log.base if "/" in log.base else None,  # a name on the hub
        library_name="transformers" if plain else "hf_posenc",
        license=licence,
        pipeline_tag="text-generation",
        tags=[*_TAGS, *log.methods],
    )
    shown = None if scores is None else before_and_after(scores)
    drawn = shown is not None and available()
    if shown is not None and drawn:
        write_figure(shown.plot(), directory / PLOT)
    text = _TEMPLATES.get_template("card.md.jinja").render(
        metadata=metadata.to_yaml(),
        log=log,
        run=log.run,
        methods=[get_method(each) for each in log.methods if each in available_methods()],
        name=name,
        plain=plain,
        adapter=adapter,
        engines=[(each, _support(each, config, adapter, name)) for each in exports],
        scores=shown,
        conclusion="" if shown is None else conclusion(shown),
        plot=PLOT if drawn else None,
        log_file=LOG,
    )
    write_atomically(directory / CARD, text)
    return directory / CARD


def _support(export: Export, config: Mapping[str, Any], adapter: bool, name: str) -> str:
    if not export.possible:
        return f"no: {export.reason}".replace("|", "\\|")
    command = f"`hf-posenc export {name} --to {export.engine}`"
    if adapter:
        return f"yes, merged into its base: {command}"
    same = all(  # an engine takes its default for a value that the saved config lacks
        config.get(key) == value
        for key, value in export.config.items()
        if key in config or key.startswith("rope")
    )
    if export.engine != _PLAIN and (not config or export.divisors or not same):
        return f"yes: {command}"
    flags = f", with `{' '.join(export.flags)}`" if export.flags else ""
    return f"yes, weights and config as they are{flags}"


def write_result(
    folder: Path | str,
    trainer: Trainer,
    log: TrainingLog,
    scores: PerplexityResult | None = None,
    *,
    name: str = "PATH",
) -> None:
    """Save the model with tokenizer, card, plot and log; `name` is the repository in the card. All ranks call it."""
    folder = Path(folder)
    trainer.save_model(str(folder))
    problem: PosencError | None = None
    if trainer.args.process_index == 0:
        try:
            # Under ZeRO-3, a model built by one process would wait for the others.
            with whole_weights(trainer.args):
                write_card(folder, log, scores, name=name)
        except PosencError as error:
            problem = error
    if (problem := gather(problem)[0]) is not None:  # all processes raise, or none
        raise problem


def print_report(scores: PerplexityResult | None, folder: Path) -> None:
    """Print the perplexities before and after the training, if measured, and the path of the model."""
    console = Console(highlight=False)
    if scores is not None:
        shown = before_and_after(scores)
        for part in (*shown.tables(), *shown.notes(), *shown.guide(), conclusion(shown)):
            console.print(part)
    console.print(f"\nThe model and its card are in {folder}", soft_wrap=True)


def print_next(
    folder: Path, scored: DocumentOptions, held_out: Sequence[str], lengths: Sequence[int]
) -> None:
    """Print the commands that measure, serve and push the result; `held_out` are names of training documents."""
    where, span = shlex.quote(str(folder)), ",".join(map(str, sorted({*lengths})))
    texts, dataset, tokens = [*(scored.text or held_out)], scored.dataset, scored.tokenized
    bare = DocumentOptions(text=texts, dataset=dataset, tokenized=tokens)
    measure = f"perplexity {where} --lengths {span}" + f" --text {shlex.join(texts)}" * bool(texts)
    names = ("dataset", "config", "split", "column", "tokenized", "encoding")
    for name in names if texts or dataset else ():
        value = getattr(scored, name)
        with contextlib.suppress(PosencError):  # one that these documents do not use
            refuse_ignored(dataclasses.replace(bare, **{name: value}))
            if value != getattr(DocumentOptions, name):
                measure += f" --{name} {shlex.quote(value)}"
    read = read_paths(held_out, encoding=scored.encoding)
    if any(isinstance(each, Skipped) for each in read):  # a part of a text, rows, or a table
        measure = f"retrieval {where} --lengths {span} --tasks passkey"
    export = ""
    with contextlib.suppress(UnsupportedModelError):  # no rotary table, no export
        if export_source(open_source(folder), "vllm").possible:
            export = f"\n  hf-posenc export {where} --to vllm"
    print(f"""
Next:
  hf-posenc {measure}{export}
  {upload(f"YOUR_NAME/{folder.resolve().name}", folder)}""")
    if not texts and not dataset:
        print("The first reads the beginnings of held-out modules of the standard library.")


def upload(repository: str, folder: Path | str) -> str:
    """Return the command that pushes a result without what is beside it."""
    excluded = " ".join(f"--exclude '{each}'" for each in _NOT_PUSHED)
    return f"hf upload {shlex.quote(repository)} {shlex.quote(str(folder))} . {excluded}"


def create_repository(arguments: TrainingArguments) -> str:
    """Create the repository of `--push-to-hub` if missing, and return its full name."""
    name = arguments.hub_model_id or Path(arguments.output_dir or ".").resolve().name
    api, branch = HfApi(token=arguments.hub_token), arguments.hub_revision
    with _explained(f"The hub refuses {name}", "Log in (`hf auth login`), or drop --push-to-hub"):
        repo = api.create_repo(name, private=arguments.hub_private_repo, exist_ok=True)
        if branch is not None:
            api.create_branch(repo.repo_id, branch=branch, exist_ok=True)
    return str(repo.repo_id)


def push(folder: Path, repository: str, arguments: TrainingArguments) -> str:
    """Upload a saved model with its card, but without subfolders, and return the commit's address."""
    way = f"The result is complete in {folder}; push it with `{upload(repository, folder)}`"
    with _explained(f"Pushing to {repository} failed", way):
        commit = HfApi(token=arguments.hub_token).upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Fine-tuned with hf_posenc",
            revision=arguments.hub_revision,
            ignore_patterns=list(_NOT_PUSHED),
        )
    return str(commit.commit_url)


@contextlib.contextmanager
def _explained(failure: str, way: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # network, token, name: each raises its own kind
        raise PosencError(f"{failure} ({one_line(error)}). {way}.") from error
