"""The result: the saved model, the printed report with the next steps, and the push to the hub."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from rich.console import Console
from transformers import Trainer, TrainingArguments

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.log import TrainingLog
from hf_posenc.training.ranks import broadcast
from hf_posenc.training.result import write_card
from hf_posenc.training.run.model import whole_weights
from hf_posenc.training.scoring import before_and_after, conclusion

# Folders in the output folder are checkpoints, records and the training text. The pickle of the arguments holds paths,
# and the hub's token if one was given.
_NOT_PUSHED = ("*/*", ".*", "*.lock", "training_args.bin")


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
    problem = broadcast(problem)  # all processes raise, or none
    if problem is not None:
        raise problem


def print_report(scores: PerplexityResult | None, folder: Path) -> None:
    """Print the perplexities before and after the training, if measured, and the path of the model."""
    console = Console(highlight=False)
    if scores is not None:
        shown = before_and_after(scores)
        for part in (*shown.tables(), *shown.notes(), *shown.guide(), conclusion(shown)):
            console.print(part)
    console.print(f"\nThe model and its card are in {folder}", soft_wrap=True)


def print_next(folder: Path, texts: Sequence[str], lengths: Sequence[int]) -> None:
    """Print the commands that measure, serve and push the result; texts are the documents that were scored."""
    where, span = shlex.quote(str(folder)), ",".join(map(str, sorted({*lengths})))
    measure = f"perplexity {where} --lengths {span}"
    if texts and all(Path(text).exists() for text in texts):
        measure += f" --text {shlex.join(texts)}"
    elif texts:  # a part of a text, or rows of a dataset
        measure = f"retrieval {where} --tasks passkey --lengths {span}"
    print(f"""
Next:
  hf-posenc {measure}
  hf-posenc export {where} --to vllm
  {upload(folder.resolve().name, folder)}""")


def upload(repository: str, folder: Path | str) -> str:
    """Return the command that pushes a result without what is beside it."""
    excluded = " ".join(f"--exclude '{each}'" for each in _NOT_PUSHED)
    return f"hf upload {shlex.quote(repository)} {shlex.quote(str(folder))} . {excluded}"


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
        arguments.push_to_hub = False
        name = arguments.hub_model_id or Path(arguments.output_dir or ".").resolve().name
        return cls(name, arguments.hub_token, arguments.hub_private_repo, arguments.hub_revision)

    @property
    def _api(self) -> HfApi:
        return HfApi(endpoint=self.endpoint, token=self.token)

    def create(self) -> str:
        """Create the repository if missing, and return its full name."""
        with _explained(
            f"The hub refuses {self.repo}", "Log in (`hf auth login`), or drop --push_to_hub"
        ):
            repo = self._api.create_repo(self.repo, private=self.private, exist_ok=True)
            if self.revision is not None:
                self._api.create_branch(repo.repo_id, branch=self.revision, exist_ok=True)
        return str(repo.repo_id)

    def push(self, directory: Path | str) -> str:
        """Upload a saved model with its card, but without subfolders, and return the commit's address."""
        name = self.create()
        way = f"The result is complete in {directory}; push it with `{upload(name, directory)}`"
        with _explained(f"Pushing to {name} failed", way):
            commit = self._api.upload_folder(
                repo_id=name,
                folder_path=directory,
                commit_message="Fine-tuned with hf_posenc",
                revision=self.revision,
                ignore_patterns=list(_NOT_PUSHED),
            )
        return str(commit.commit_url)


@contextlib.contextmanager
def _explained(failure: str, way: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # network, token, name: each raises its own kind
        raise PosencError(f"{failure} ({one_line(error)}). {way}.") from error
