"""The result of a training: the saved model, its card and plots, the printed report, and the push to the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from transformers import Trainer, TrainingArguments

from hf_posenc.engines import ENGINES, Export, export_source
from hf_posenc.engines.source import open_source
from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.grid import Grid, to_markdown, to_rich
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import available, write_figure
from hf_posenc.files import to_json, write_atomically
from hf_posenc.methods import available_methods, get_method
from hf_posenc.patch.report import Patch
from hf_posenc.training.log import FILE as LOG
from hf_posenc.training.log import TrainingLog, loss_figure, loss_points, published
from hf_posenc.training.preparation import whole_weights
from hf_posenc.training.ranks import broadcast
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.scoring import before_and_after, conclusion
from hf_posenc.verification import require, verify_export

CARD = "README.md"
LOSS_PLOT = "loss.png"
PERPLEXITY_PLOT = "perplexity.png"
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


def check_verifiable(patch: Patch | None, train: str) -> None:
    """Check before the training that plain transformers can load the result, for `--verify_export`."""
    if train == "lora":
        raise PosencError(
            "--verify_export loads whole weights in plain transformers, and --train lora saves an adapter. Merge it "
            "(merge_and_unload), save that, and run `hf-posenc export DIR --to transformers5 --verify`."
        )
    if patch is not None and patch.export is None:
        raise PosencError(
            f"--verify_export: transformers has no {' + '.join(patch.methods)}; load by hf_posenc.from_pretrained."
        )


def write_result(
    folder: Path | str,
    trainer: Trainer,
    log: TrainingLog,
    scores: PerplexityResult | None = None,
    *,
    verify: bool = False,
    name: str = "PATH",
) -> None:
    """Save the model with its tokenizer, card, plots and log, and `verify` that plain transformers computes the same.

    All processes call it. `name` is the repository in the card.
    """
    folder = Path(folder)
    trainer.save_model(str(folder))
    problem: PosencError | None = None
    if trainer.args.process_index == 0:
        try:
            # Under ZeRO-3, a model built by one process would wait for the others.
            with whole_weights(trainer.args):
                verified = _verify(folder) if verify else None
                write_card(folder, log, scores, verified=verified, name=name)
        except PosencError as error:
            problem = error
    problem = broadcast(problem)  # all processes raise, or none
    if problem is not None:
        raise problem


def _verify(folder: Path) -> str:
    checked = verify_export(folder)
    require(checked)
    message = (
        f"Loaded in a clean process with transformers {checked.version} and without hf_posenc, its logits differ by "
        f"{checked.error:.1e} of the largest ({checked.tokens} tokens, positions to {checked.reach:,})."
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(message)
    return message


def report(scores: PerplexityResult) -> Iterator[Grid | str]:
    """Yield the tables before and after the training, then their notes, and a conclusion."""
    shown = before_and_after(scores)
    yield from shown.tables()
    yield from shown.notes()
    yield from shown.guide()
    yield conclusion(shown)


def print_report(scores: PerplexityResult | None, folder: Path) -> None:
    """Print the perplexities before and after the training, if measured, and the path of the model."""
    console = Console(highlight=False)
    for part in () if scores is None else report(scores):
        console.print(to_rich(part) if isinstance(part, Grid) else part)
    console.print(f"\nThe model, its card and its plots are in {folder}", soft_wrap=True)


def write_card(
    directory: Path | str,
    log: TrainingLog,
    scores: PerplexityResult | None = None,
    exports: Sequence[Export] | None = None,
    *,
    licence: str | None = None,
    verified: str | None = None,
    name: str = "PATH",
) -> Path:
    """Write a model card into a saved model's folder, with its plots and the data behind it.

    Args:
        directory: The folder.
        log: The log of the training.
        scores: The rows of `Scores`.
        exports: The exports of the folder (`hf_posenc.engines`); by default one per engine is computed.
        licence: The model's, as the hub names it, such as `apache-2.0`; by default the card names none.
        verified: The result of `--verify_export`, in a sentence.
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
        source = open_source(directory)
        exports = [export_source(source, engine) for engine in ENGINES]
    write_atomically(directory / LOG, to_json(log.to_dict()))
    if scores is not None:
        published(scores).write_json(directory / SCORES)
    plots = []
    if available() and loss_points(log.log_history):
        write_figure(loss_figure(log.log_history, scores), directory / LOSS_PLOT)
        plots.append(("Training loss and held-out perplexity by step", LOSS_PLOT))
    if available() and scores is not None:
        write_figure(before_and_after(scores).plot(), directory / PERPLEXITY_PLOT)
        plots.append(("Held-out perplexity by context length", PERPLEXITY_PLOT))
    saved = directory / "config.json"
    config = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    adapter = log.train == "lora"
    plain = not adapter and any(each.possible for each in exports if each.engine == _PLAIN)
    metadata = ModelCardData(
        base_model=log.base if "/" in log.base else None,  # a name on the hub
        library_name="transformers" if plain else "hf_posenc",
        license=licence,
        pipeline_tag="text-generation",
        tags=[*_TAGS, *log.methods],
    )
    shown = None if scores is None else before_and_after(scores)
    text = _TEMPLATES.get_template("card.md.jinja").render(
        metadata=metadata.to_yaml(),
        log=log,
        run=log.run,
        methods=[get_method(each) for each in log.methods if each in available_methods()],
        name=name,
        plain=plain,
        adapter=adapter,
        engines=[(each, _support(each, config, adapter, name)) for each in exports],
        verified=verified,
        scores=shown,
        conclusion="" if shown is None else conclusion(shown),
        plots=plots,
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


@dataclass(frozen=True)
class Hub:
    """A repository on the Hugging Face hub that a result is pushed to: `user/name`, or a name of the token's user.

    The defaults are those of `hf auth login`, of the user's settings, the branch `main`, and HF_ENDPOINT.
    """

    repo: str
    token: str | None = None
    private: bool | None = None
    revision: str | None = None
    endpoint: str | None = None

    @classmethod
    def taken_from(cls, arguments: TrainingArguments) -> Hub | None:
        """Read `--push_to_hub` and its options, if given, and switch off the Trainer's own pushes.

        The Trainer would overwrite the card with its own, and save into the folder once more.
        """
        if not arguments.push_to_hub:
            return None
        strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
        if "checkpoint" in strategy:
            raise PosencError(
                f"--hub_strategy {strategy}: only the result is pushed. Use --hub_strategy end; for a checkpoint: hf "
                "upload REPO OUTPUT_DIR/checkpoint-N checkpoint-N."
            )
        arguments.push_to_hub = False
        name = arguments.hub_model_id or Path(arguments.output_dir or ".").resolve().name
        return cls(name, arguments.hub_token, arguments.hub_private_repo, arguments.hub_revision)

    def create(self) -> str:
        """Create the repository if missing, and return its full name."""
        try:
            repo = self._api().create_repo(self.repo, private=self.private, exist_ok=True)
            if self.revision is not None:
                self._api().create_branch(repo.repo_id, branch=self.revision, exist_ok=True)
        except Exception as error:  # network, token, name: each raises its own kind
            raise PosencError(
                f"The hub refuses {self.repo} ({one_line(error)}). Log in (`hf auth login`), or drop --push_to_hub."
            ) from error
        return str(repo.repo_id)

    def push(self, directory: Path | str) -> str:
        """Upload a saved model with its card, but without subfolders, and return the commit's address."""
        directory = Path(directory)
        if not (directory / CARD).is_file():
            raise PosencError(f"{directory} has no {CARD}: write_card makes one.")
        name = self.create()
        try:
            commit = self._api().upload_folder(
                repo_id=name,
                folder_path=directory,
                commit_message="Fine-tuned with hf_posenc",
                revision=self.revision,
                ignore_patterns=list(_NOT_PUSHED),
            )
        except Exception as error:
            excluded = " ".join(f"--exclude '{pattern}'" for pattern in _NOT_PUSHED)
            raise PosencError(
                f"Pushing to {name} failed ({one_line(error)}). The result is complete in {directory}; push it with "
                f"`hf upload {name} {directory} . {excluded}`."
            ) from error
        return str(commit.commit_url)

    def _api(self) -> HfApi:
        return HfApi(endpoint=self.endpoint, token=self.token)
