"""What a training leaves: the model, proof that it loads elsewhere, a card with its numbers, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import Trainer

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.patch import Patch
from hf_posenc.training.card import write_card
from hf_posenc.training.ranks import from_first
from hf_posenc.training.scoring_report import report
from hf_posenc.training.sharding import whole_weights
from hf_posenc.training.training_log import TrainingLog


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
    told: Any = from_first(problem)  # all processes stop, or none
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
