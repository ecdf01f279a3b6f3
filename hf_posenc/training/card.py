"""The model card of a fine-tuned model: every number in it comes from the training's log and the scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.files import to_json, write_atomically
from hf_posenc.evaluation.plots import available, figure, write_figure
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.training.card_sections import loading, loads_plainly, measured, title, training
from hf_posenc.training.names import published
from hf_posenc.training.plot import loss_figure, loss_points
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.stages import before_and_after
from hf_posenc.training.training_log import FILE as LOG
from hf_posenc.training.training_log import TrainingLog

if TYPE_CHECKING:
    from hf_posenc.engines.exporting import Export

CARD = "README.md"
LOSS_PLOT = "loss.png"
PERPLEXITY_PLOT = "perplexity.png"
TAGS = ("hf_posenc", "long-context", "positional-encoding")


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
    """Writes a card into a saved model's folder, with the plots that it shows and the data behind it.

    Args:
        directory: The folder.
        log: What the training was.
        scores: The rows of `Scores`.
        exports: What loads the folder (`hf_posenc.engines`, one for each engine); by default all are asked.
        licence: The model's, as the hub names it, such as `apache-2.0`; by default the card names none.
        verified: What `--verify_export` found, in a sentence.
        name: What the model is loaded by, such as its name on the hub.

    Returns:
        The card.

    Raises:
        PosencError: A file cannot be written.
    """
    directory = Path(directory)
    if exports is None:
        exports = all_exports(directory)
    write_atomically(directory / LOG, to_json(log.to_dict()))
    if scores is not None:
        published(scores).write_json(directory / SCORES)
    plots = _draw(directory, log, scores)
    saved = directory / "config.json"
    text = model_card(
        log,
        scores,
        exports,
        config=json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else None,
        plots=plots,
        licence=licence,
        verified=verified,
        name=name,
    )
    write_atomically(directory / CARD, text)
    return directory / CARD


def all_exports(directory: Path) -> list[Export]:
    """What each engine makes of a saved model.

    Raises:
        PosencError: It is none.
    """
    from hf_posenc.engines.exporting import ENGINES, export

    return [export(directory, engine) for engine in ENGINES]


def model_card(
    log: TrainingLog,
    scores: PerplexityResult | None,
    exports: Sequence[Export],
    *,
    config: Mapping[str, Any] | None = None,
    plots: Sequence[tuple[str, str]] = (),
    licence: str | None = None,
    verified: str | None = None,
    name: str = "PATH",
) -> str:
    """The text of a card.

    Args:
        log: As for `write_card`, as are the others.
        scores: See there.
        exports: See there.
        config: What is in the saved `config.json`.
        plots: What each shows, and its file beside the card.
        licence: See there.
        verified: See there.
        name: See there.
    """
    parts = (
        [_front_matter(log, exports, licence)],
        title(log),
        loading(exports, config, log.train == "lora", verified, name),
        measured(scores, plots),
        training(log),
    )
    return "\n".join(line for part in parts for line in (*part, "")).rstrip() + "\n"


def _front_matter(log: TrainingLog, exports: Sequence[Export], licence: str | None) -> str:
    from huggingface_hub import ModelCardData

    plain = loads_plainly(exports) and log.train != "lora"
    data = ModelCardData(
        base_model=log.base if "/" in log.base else None,  # a name on the hub
        library_name="transformers" if plain else "hf_posenc",
        license=licence,
        pipeline_tag="text-generation",
        tags=[*TAGS, *log.methods],
    )
    return f"---\n{data.to_yaml()}\n---"


def _draw(
    directory: Path, log: TrainingLog, scores: PerplexityResult | None
) -> list[tuple[str, str]]:
    """Draws what there is to draw, where matplotlib is installed."""
    plots: list[tuple[str, str]] = []
    if not available():
        return plots
    if loss_points(log.log_history):
        write_figure(loss_figure(log.log_history, scores), directory / LOSS_PLOT)
        plots.append(("Training loss and held-out perplexity by step", LOSS_PLOT))
    if scores is not None:
        write_figure(figure(before_and_after(scores)), directory / PERPLEXITY_PLOT)
        plots.append(("Held-out perplexity by context length", PERPLEXITY_PLOT))
    return plots
