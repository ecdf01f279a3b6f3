"""What a training leaves: the model, proof that it loads elsewhere, a card with its numbers, and a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import Trainer

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.patch.report import Patch
from hf_posenc.training.card import CARD, write_card
from hf_posenc.training.log import TrainingLog
from hf_posenc.training.preparation import whole_weights
from hf_posenc.training.ranks import broadcast
from hf_posenc.training.scoring import report

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_verifiable(patch: Patch | None, train: str) -> None:
    """Whether `--verify_export` will have something to load: asked before the training.

    Raises:
        PosencError: Plain transformers cannot load what will be saved.
    """
    if train == "lora":
        raise PosencError(
            "--verify_export loads whole weights in plain transformers, and --train lora saves an adapter. Merge it "
            "(merge_and_unload), save that, and run `hf-posenc export DIR --to transformers5 --verify`."
        )
    if patch is not None and patch.export is None:
        raise PosencError(
            f"--verify_export: plain transformers has no form for {' + '.join(patch.methods)}; "
            "hf_posenc.from_pretrained loads the result."
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
    """Saves the model with its tokenizer, card, plots and log. All processes call it.

    Args:
        folder: Where to.
        trainer: After `train()`.
        log: What the training was.
        scores: The rows of `Scores`.
        verify: Load the result in a process without hf_posenc and compare the logits.
        name: Of the repository that it will be pushed to, for the card.

    Raises:
        VerificationError: That process computed another model; nothing has taken the place of an earlier result then.
        PosencError: A file cannot be written.
    """
    folder = Path(folder)
    trainer.save_model(str(folder))
    problem: PosencError | None = None
    if trainer.args.process_index == 0:
        try:
            # Under ZeRO-3 a model that one process builds would wait for the others to build it too.
            with whole_weights(trainer.args):
                verified = _verified(folder) if verify else None
                write_card(folder, log, scores, verified=verified, name=name)
        except PosencError as error:
            problem = error
    told: Any = broadcast(problem)  # all processes stop, or none
    if told is not None:
        raise told


def _verified(folder: Path) -> str:
    """What a clean process found, in a sentence."""
    from hf_posenc.verification import require, verify_export

    found = verify_export(folder)
    require(found)
    said = (
        f"Loaded in a clean process with transformers {found.version} and without hf_posenc, its logits differ by "
        f"{found.error:.1e} of the largest ({found.tokens} tokens, positions to {found.reach:,})."
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(said)
    return said


def print_report(scores: PerplexityResult | None, folder: Path) -> None:
    """Prints the perplexities before and after, where they were measured, and where the model is."""
    console = Console(highlight=False)
    for part in () if scores is None else report(scores):
        console.print(part)
    console.print(f"\nThe model, its card and its plots are in {folder}", soft_wrap=True)


# Pushing the result of a training to the Hugging Face hub, with its own card.


# Folders in the output folder are checkpoints, records and the training text. The pickle of the arguments holds paths,
# and the hub's token where one was given.
LEFT_OUT = ("*/*", ".*", "*.lock", "training_args.bin")


@dataclass(frozen=True)
class Hub:
    """Where a result is pushed to.

    Attributes:
        repo: `user/name`, or a name alone for the token's user.
        token: By default the one that `hf auth login` has stored.
        private: Whether a new repository is private; by default as the user's or organization's settings say.
        revision: A branch; by default `main`.
        endpoint: The hub's address; by default as HF_ENDPOINT says.
    """

    repo: str
    token: str | None = None
    private: bool | None = None
    revision: str | None = None
    endpoint: str | None = None

    @classmethod
    def taken_from(cls, arguments: TrainingArguments) -> Hub | None:
        """Reads `--push_to_hub` and the options beside it, and takes the pushing off the Trainer.

        The Trainer would write a card of its own over ours, and save into the folder once more.

        Returns:
            Where to push to, once, at the end; `None` if nobody asked for it.

        Raises:
            PosencError: Checkpoints are to be pushed too.
        """
        if not arguments.push_to_hub:
            return None
        strategy = str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy))
        if "checkpoint" in strategy:
            raise PosencError(
                f"--hub_strategy {strategy}: the result is pushed, and no checkpoint. Use --hub_strategy end; for a "
                "checkpoint: hf upload REPO OUTPUT_DIR/checkpoint-N checkpoint-N."
            )
        arguments.push_to_hub = False
        name = arguments.hub_model_id or Path(arguments.output_dir or ".").resolve().name
        return cls(name, arguments.hub_token, arguments.hub_private_repo, arguments.hub_revision)

    def create(self) -> str:
        """Makes the repository where it does not exist: before the training, so that a wrong token costs nothing.

        Returns:
            Its full name.

        Raises:
            PosencError: The hub refuses, or cannot be reached.
        """
        try:
            made = self._api().create_repo(self.repo, private=self.private, exist_ok=True)
            if self.revision is not None:
                self._api().create_branch(made.repo_id, branch=self.revision, exist_ok=True)
        except Exception as error:  # the network, the token, the name: each raises in its own way
            raise PosencError(
                f"The hub does not give us {self.repo} ({one_line(error)}). Log in with `hf auth login`, or leave "
                "--push_to_hub out."
            ) from error
        return str(made.repo_id)

    def push(self, directory: Path | str, message: str = "Fine-tuned with hf_posenc") -> str:
        """Uploads a saved model with its card, in one commit.

        Args:
            directory: The folder; what lies in folders inside it stays here.
            message: Of the commit.

        Returns:
            The commit's address.

        Raises:
            PosencError: There is no card, or the hub refuses. The folder is what it was.
        """
        directory = Path(directory)
        if not (directory / CARD).is_file():
            raise PosencError(f"{directory} has no {CARD}: write_card makes one.")
        name = self.create()
        try:
            commit = self._api().upload_folder(
                repo_id=name,
                folder_path=directory,
                commit_message=message,
                revision=self.revision,
                ignore_patterns=list(LEFT_OUT),
            )
        except Exception as error:
            without = " ".join(f"--exclude '{pattern}'" for pattern in LEFT_OUT)
            raise PosencError(
                f"Pushing to {name} failed ({one_line(error)}). The result is whole in {directory}; push it with "
                f"`hf upload {name} {directory} . {without}`."
            ) from error
        return str(commit.commit_url)

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)
