"""The model card of a training, with its plot and the data behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_posenc.engines import ENGINES, Export, export_source
from hf_posenc.engines.engine import open_source
from hf_posenc.evaluation.grid import to_markdown
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import available, write_figure
from hf_posenc.files import to_json, write_atomically
from hf_posenc.methods import available_methods, get_method
from hf_posenc.training.log import FILE as LOG
from hf_posenc.training.log import TrainingLog, published
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.scoring import before_and_after, conclusion

CARD = "README.md"
PLOT = "perplexity.png"
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
        source = open_source(directory)
        exports = [export_source(source, engine) for engine in ENGINES]
    write_atomically(directory / LOG, to_json(log.to_dict()))
    if scores is not None:
        published(scores).write_json(directory / SCORES)
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
