"""The model card of a fine-tuned model: every number in it comes from the training's log and the scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.grid import to_markdown
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import available, figure, write_figure
from hf_posenc.files import to_json, write_atomically
from hf_posenc.methods import available_methods, get_method
from hf_posenc.training.log import FILE as LOG
from hf_posenc.training.log import TrainingLog, loss_figure, loss_points, published
from hf_posenc.training.scoring import FILE as SCORES
from hf_posenc.training.scoring import before_and_after, conclusion

if TYPE_CHECKING:
    from hf_posenc.engines.exporting import Export


# The parts of a model card, each as lines of Markdown.


PLAIN = "transformers5"
TRAINED = {
    "full": "all weights",
    "lora": "a LoRA adapter, with embeddings and norms",
    "encoding": "the encoding's own parameters only",
}
POSITIONS = {
    "contiguous": "as they come",
    "packed": "anew in every document of a block; the documents do not see each other",
    "pose": "PoSE (Zhu et al. 2023, arXiv 2309.10400), up to {target:,}",
    "random": "randomized (Ruoss et al. 2023, arXiv 2305.16843), up to {target:,}",
    "cream": "CREAM (Wu et al. 2024, arXiv 2406.07138), up to {target:,}",
}


def title(log: TrainingLog) -> Iterator[str]:
    """The heading, what the model is, and the source of each method."""
    how = f" with {log.label}" if log.label else ""
    reach = f" for {log.extended:,} tokens" if log.extended else ""
    yield f"# {log.base}{reach}{how or ', fine-tuned'}"
    yield ""
    before = f"trained at {log.original:,} tokens, " if log.original else ""
    taken = f"taken to {log.extended:,} " if log.extended else ""
    yield (
        f"{log.base} ({log.model['class']}, {log.model['parameters']:,} parameters), {before}{taken}{how.strip()}"
        f"{' and ' if how else ''}fine-tuned for {log.run['steps']:,} steps."
    )
    for name in log.methods:
        if name in available_methods():
            method = get_method(name)
            yield f"`{name}`: {method.summary} ({method.source})."


def loads_plainly(exports: Sequence[Export]) -> bool:
    """Whether plain transformers 5 computes the saved model."""
    return any(export.possible for export in exports if export.engine == PLAIN)


def loading(
    exports: Sequence[Export],
    config: Mapping[str, Any] | None,
    adapter: bool,
    verified: str | None,
    name: str,
) -> Iterator[str]:
    """How to load the model, and what else computes it."""
    plain = loads_plainly(exports) and not adapter
    yield from ("## How to load it", "", "```python")
    if plain:
        yield "from transformers import AutoModelForCausalLM"
    else:
        yield "from hf_posenc import from_pretrained  # pip install hf-posenc"
    loader = "AutoModelForCausalLM.from_pretrained" if plain else "from_pretrained"
    yield from ("", f'model = {loader}("{name}")', "```", "")
    if adapter:
        yield (
            "This is an adapter for a model whose positions were changed. Plain PEFT refuses it; `from_pretrained` "
            "loads the base, patches it and adds the adapter.\n"
        )
    elif not plain:
        yield (
            "Only hf_posenc loads it. Plain transformers has no words for this encoding and would run the weights "
            "under another one.\n"
        )
    yield from ("| engine | computes this model |", "| --- | --- |")
    for export in exports:
        yield f"| {export.engine} ({export.version}) | {_said(export, config, adapter, name)} |"
    if verified:
        yield from ("", verified)


def _said(export: Export, config: Mapping[str, Any] | None, adapter: bool, name: str) -> str:
    if not export.possible:
        return f"no: {export.reason}".replace("|", "\\|")
    command = f"`hf-posenc export {name} --to {export.engine}`"
    if adapter:
        return f"yes, merged into its base: {command}"
    own = export.engine == PLAIN  # whose config is the saved one
    read = config is not None and not export.divisors and _same_positions(export.config, config)
    if not (own or read):
        return f"yes: {command}"
    flags = f", with `{' '.join(export.flags)}`" if export.flags else ""
    return f"yes, weights and config as they are{flags}"


def _same_positions(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a saved config says what an engine needs; what it leaves out has its default."""
    return all(
        saved.get(key) == value
        for key, value in wanted.items()
        if key in saved or key.startswith("rope")
    )


def measured(scores: PerplexityResult | None, plots: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The tables and plots."""
    yield from ("## Measured", "")
    if scores is None:
        yield "No perplexity was measured."
    else:
        shown = before_and_after(scores)
        yield f"On held-out documents, {conclusion(shown)}."
        for protocol in shown.settings.protocols:
            yield from ("", f"{protocol}: {shown.settings.definition(protocol)}.", "")
            yield to_markdown(shown.table(protocol))
        yield ""
        yield from (f"- {line}" for line in shown.notes())
        yield (
            "- Perplexity averages over words most of which need no far text; what a model finds far away is another "
            "question (`hf-posenc retrieval`)."
        )
    for what, file in plots:
        yield from ("", f"![{what}]({file})")


def training(log: TrainingLog) -> Iterator[str]:
    """How the model was trained."""
    run, data = log.run, log.data
    versions = (f"{name} {version}" for name, version in log.environment.items() if version)
    rows = {
        "trained": f"{TRAINED[log.train]}: {log.model['trained']:,} parameters",
        "text": _text(data),
        "positions": _positions(data),
        "steps": _steps(run),
        "optimizer": _optimizer(run),
        "precision": _precision(log),
        "processes": _processes(run),
        "seed": run["seed"],
        "versions": ", ".join(versions),
    }
    yield from ("## Training", "", "| | |", "| --- | --- |")
    yield from (f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    if log.command:
        yield from ("", "```bash", log.command, "```")
    yield from ("", f"Every logged number is in [{LOG}]({LOG}).")


def _text(data: Mapping[str, Any]) -> str | None:
    source = data.get("source") or {}
    named = [source.get("kind"), source.get("name"), *source.get("paths", ())]
    said = [str(name) for name in named if name]
    if "documents" in data:
        said.append(f"{data['documents']:,} documents of {data['tokens']:,} tokens in all")
    if "blocks" in data:
        said.append(f"{data['blocks']:,} blocks of {data['block_length']:,} tokens")
    return ", ".join(said) or None


def _positions(data: Mapping[str, Any]) -> str | None:
    if "positions" not in data:
        return None
    return POSITIONS[data["positions"]].format(target=data.get("target_length") or 0)


def _steps(run: Mapping[str, Any]) -> str:
    text = f"{run['steps']:,} of {run['sequences_per_step']:,} sequences"
    if run.get("tokens_seen"):
        text += f", {run['tokens_seen']:,} tokens"
    if run.get("epochs"):
        text += f", {run['epochs']:.2f} epochs"
    return text


def _optimizer(run: Mapping[str, Any]) -> str:
    betas = " and ".join(f"{beta:g}" for beta in run["betas"])
    return (
        f"{run['optimizer']}, learning rate {run['learning_rate']:g} ({run['lr_scheduler_type']}, "
        f"{run['warmup_steps']:,} steps of warmup), betas {betas}, weight decay {run['weight_decay']:g}, gradients "
        f"clipped at {run['max_grad_norm']:g}"
    )


def _precision(log: TrainingLog) -> str:
    text = f"weights in {log.model['dtype']}"
    if log.run["precision"] is not None:
        text += f", computed in {log.run['precision']}"
    return text + (", gradient checkpointing" if log.run["gradient_checkpointing"] else "")


def _processes(run: Mapping[str, Any]) -> str:
    how = f" ({run['distributed']})" if run.get("distributed") else ""
    time = f", {run['seconds']:,.0f} seconds" if run.get("seconds") else ""
    return f"{run['processes']:,} on {run['device']}{how}{time}"


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
