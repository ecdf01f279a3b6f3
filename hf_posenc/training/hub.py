"""Pushing the result of a training to the Hugging Face hub, with its own card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import one_line
from hf_posenc.training.card import CARD

if TYPE_CHECKING:
    from transformers import TrainingArguments

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
