"""Write docs/architectures.md: every architecture of the installed transformers, patched with every method.

    python -m scripts.make_architectures            # writes the page
    python -m scripts.make_architectures --check    # exits 1 if the committed page is out of date

Run it from the checkout. Each row is measured on a tiny random model (tests/support/zoo.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
import typer
from rich.progress import track

from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    get_method,
    get_patch,
    inspect_rope,
    patch_model,
    unpatch_model,
)
from scripts import attention_coverage
from tests.support import zoo
from tests.support.zoo_registry import causal_lm_types

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"

HEADER = """# Architectures

Written by `python -m scripts.make_architectures` with transformers {version}; do not edit.

Every row is a tiny random model that was built, patched with each of the {count} frequency methods and with methods of
every kind that computes attention itself, and read back. That a patched model computes what transformers itself
computes for the same frequency method, or what a pair-by-pair reference does, is what
`tests/model/test_architectures.py` and
`tests/model/test_attention_architectures.py` check, for all of them with `pytest -m "slow or not slow"`.

- **rotary**: the class of the module that is wrapped, and its path (`x4`: four of them).
- **tables**: the layer types that have a table of their own, and how many features of a head of 16 they rotate.
- **methods**: which frequency methods can be patched in, the dynamic ones with `update="sequence"`.
- **rotary bands**, **biases**, **{last}**: which methods that compute attention itself, by trial of
  {tried}.
  *all*: each of these, in the full-attention layers. The reason of a refusal stands there in a few words;
  [below](#refused-by-methods-that-compute-attention) is what `patch_model` says.
- **saved as**: how plain `from_pretrained`, without hf_posenc, computes the static frequency methods after
  `save_pretrained`: how many in transformers' own words (*native*), how many as a *longrope* list, and how many only by
  `hf_posenc.from_pretrained` (*hf_posenc*), which loads all that computes attention too.
"""

REFUSED = f"""Messages of `patch_model`, with `{attention_coverage.ANY_NAME}` for a method or a module of the model."""

COLUMNS = ("model type", "rotary", "tables", "methods", *attention_coverage.GROUPS, "saved as")

OPTIONS: dict[str, dict[str, Any]] = {"abf": {"rope_theta": 40e6}}


def options_for(method: str, pairs: int) -> dict[str, Any]:
    """Options with which a frequency method has an effect and leaves attention to the model."""
    options = dict(OPTIONS.get(method, {"scale": 4.0} if get_method(method).takes_scale() else {}))
    if method == "longrope":
        options |= {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    return options | ({"update": "sequence"} if get_method(method).length_dependent else {})


def row(model_type: str, refusals: attention_coverage.Refusals | None = None) -> tuple[str, ...]:
    """Return the cells of `COLUMNS` for one architecture with a rotation.

    Args:
        model_type: The type.
        refusals: Collects the full refusals of methods that compute attention.
    """
    refusals = attention_coverage.Refusals() if refusals is None else refusals
    model = zoo.build(model_type)
    try:
        tables = inspect_rope(model)
    except UnsupportedModelError as error:
        cells = dict.fromkeys(COLUMNS, "")
        cells |= {"model type": model_type, "methods": f"none: {first_sentence(error)}"}
        return tuple(cells.values())
    original = zoo.ORIGINAL_LENGTH if zoo.length_of(model.config) is None else None
    works: dict[str, str] = {}
    fails: dict[str, list[str]] = {}
    for method in zoo.frequency_methods():
        knobs = options_for(method, tables[0].dim // 2)
        try:
            patch_model(
                model,
                method,
                layers="all",
                replace=True,
                original_max_position_embeddings=original,
                **knobs,
            )
        except PosencError as error:
            reason = first_sentence(error).removeprefix(method).lstrip(": ")
            fails.setdefault(reason, []).append(method)
            continue
        state = get_patch(model)
        assert state is not None
        works[method] = state.export or "hf_posenc"
        unpatch_model(model)
    paths = [path for table in tables for path in table.modules]
    first = dict.fromkeys(paths)
    kind = type(model.get_submodule(next(iter(first)))).__name__
    where = f"`{next(iter(first))}`" + (f" x{len(first)}" if len(first) > 1 else "")
    return (
        model_type,
        f"{kind} {where}",
        widths(model, tables),
        coverage(works, fails),
        *attention_coverage.cells(model_type, model, original, refusals),
        exports(works),
    )


def widths(model: Any, tables: Iterable[Any]) -> str:
    """Format the layer types and rotated parts of the head, as in `full 8/16, sliding 16/16`."""
    found = []
    for table in tables:
        label = (table.layer_type or "").removesuffix("_attention")
        rotated = int((table.inv_freq != 0).sum()) * 2
        found.append(f"{label} {rotated}".strip())
    return ", ".join(sorted(set(found)))  # some configs keep their layer types in a set


def coverage(works: dict[str, str], fails: dict[str, list[str]]) -> str:
    """Format the methods that work, and the reasons why the others do not."""
    if not fails:
        return "all"
    reasons = "; ".join(f"not {', '.join(methods)}: {reason}" for reason, methods in fails.items())
    return f"{'all others' if works else 'none'}; {reasons}"


def exports(works: dict[str, str]) -> str:
    """Count the static methods saved in each form."""
    static = {m: form for m, form in works.items() if not get_method(m).length_dependent}
    forms = {"rope_parameters": "native", "longrope": "longrope", "hf_posenc": "hf_posenc"}
    counts = {name: sum(form == key for form in static.values()) for key, name in forms.items()}
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def first_sentence(error: Exception) -> str:
    """Return the reason of a refusal without the advice."""
    return str(error).split(". ")[0].rstrip(".").replace("|", "\\|")


def refusal(model_type: str) -> tuple[str, str]:
    """Return the refusal of `patch_model` for a causal language model without a rotation."""
    try:
        model = zoo.build(model_type)
    except Exception as error:  # whatever a configuration class raises for unsupported sizes
        return model_type, f"not tried: no tiny model could be built ({type(error).__name__})"
    try:
        patch_model(model, "yarn", scale=4.0)
    except PosencError as error:
        return model_type, first_sentence(error)
    raise SystemExit(
        f"{model_type} does not rotate, as tests/support/zoo.py has it, but could be patched."
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table in Markdown."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """Return the whole page."""
    refusals = attention_coverage.Refusals()

    def rows(title: str, types: Iterable[str]) -> list[tuple[str, ...]]:
        return [row(model_type, refusals) for model_type in track(list(types), title)]

    decoders = table(COLUMNS, rows("decoders", zoo.decoder_types()))
    towers = table(COLUMNS, rows("text towers", zoo.text_tower_types()))
    composites = table(COLUMNS, rows("multimodal", zoo.composite_types()))
    others = sorted(set(causal_lm_types()) - set(zoo.decoder_types()) - set(zoo.NOT_BUILT))
    refused = table(("model type", "reason"), [refusal(t) for t in track(others, "without RoPE")])
    untried = table(("model type", "reason"), sorted(zoo.NOT_BUILT.items()))
    return (
        "\n\n".join(
            (
                HEADER.format(
                    version=transformers.__version__,
                    count=len(zoo.frequency_methods()),
                    last=list(attention_coverage.GROUPS)[-1],
                    tried=attention_coverage.tried(),
                ).rstrip(),
                f"## Decoders of AutoModelForCausalLM ({len(zoo.decoder_types())})",
                decoders,
                f"## Text decoders of multimodal models, by themselves ({len(zoo.text_tower_types())})",
                towers,
                f"## Multimodal models, whole ({len(zoo.composite_types())})",
                composites,
                "## Refused by methods that compute attention",
                REFUSED,
                refusals.section(),
                f"## Causal language models without RoPE: refused ({len(others)})",
                refused,
                f"## Rotary, but not tried ({len(zoo.NOT_BUILT)})",
                untried,
            )
        )
        + "\n"
    )


def main(check: bool = typer.Option(False, help="Compare instead of writing.")) -> None:
    """Write docs/architectures.md, or check that it is up to date."""
    new = page()
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        return
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if old != new:
        diff = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "committed", "now", lineterm="", n=0
        )
        print("\n".join(diff))
        print("docs/architectures.md is stale: run python -m scripts.make_architectures")
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
