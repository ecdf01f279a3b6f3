"""Parts of docs/finetuning.md that are generated from committed runs, for scripts/make_readme.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.evaluation.grid import markdown_table, number
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.result import TrainingLog
from hf_posenc.training.scoring import conclusion
from scripts.results import BENCHMARKS, DOCS, at, made_with, perplexity, read, summary, table

WAYS = BENCHMARKS / "finetuning.json"
POSITIONS = BENCHMARKS / "positions.json"
SHORT = BENCHMARKS / "short_training.json"
CONVERSIONS = BENCHMARKS / "conversions.json"
SMOLLM2 = BENCHMARKS / "smollm2_training.json"
FOLDER, RESULT = DOCS / "data" / "finetuned", "longer"
RECIPES = "hf_posenc/training/recipes"
COMMANDS = {
    "finetune": f"hf-posenc finetune --output-dir {RESULT}",
    "evaluate": f"hf-posenc perplexity {RESULT} --patch none --lengths 256,512,1024,2048 --output {RESULT}-perplexity",
    "transformers4": f"hf-posenc export {RESULT} --to transformers4",
    "vllm": f"hf-posenc export {RESULT} --to vllm",
    "llama.cpp": f"hf-posenc export {RESULT} --to llama.cpp",
}  # fmt: skip
"""The commands of the worked example, by the name of the file in `FOLDER` with their output."""
_ENGINES = ("transformers4", "vllm", "llama.cpp")


def example() -> str:
    """Return the worked example: extend, fine-tune, evaluate, export, each command with its results."""
    log = TrainingLog.read(FOLDER)
    scores = perplexity(FOLDER / "perplexity.json")
    evaluated = perplexity(FOLDER / "evaluation.json")
    run = log.run
    trained = (
        f"{run['steps']} steps of {run['sequences_per_step']} blocks of {log.data['block_length']:,} tokens, "
        f"{run['tokens_seen']:,} tokens, in {run['seconds']:.0f} seconds on a CPU. On held-out modules, "
        f"{conclusion(scores)}:"
    )
    beyond = (
        "Evaluate the saved model, also beyond the length that it was trained for. `none` here means no patch beyond "
        "the saved one. The numbers differ from those above because the text differs: the beginnings of the first "
        f"{len(evaluated.documents)} of the held-out modules."
    )
    parts = [
        "Extend and fine-tune:",
        _fence(COMMANDS["finetune"]),
        trained,
        _table(scores),
        beyond,
        _fence(COMMANDS["evaluate"]),
        _table(evaluated),
        "Export. transformers 5 loads the saved model itself; other engines need an export:",
        *(f"{_fence(COMMANDS[name])}\n\n{_fence(_printed(name), 'text')}" for name in _ENGINES),
        "[docs/data/finetuned/](data/finetuned/) contains the model card, the log and every number.",
    ]
    return "\n\n".join(parts)


def ways() -> str:
    """Return the tail perplexities of the embedded model after each way of training."""
    result: dict[str, Any] = read(WAYS)
    intro = (
        "Tail perplexity of the embedded Llama (trained at 256 tokens) on the same held-out tokens, "
        f"{result['steps']} steps with the same number of tokens each"
    )
    return _of_ways(result, {}, intro, "ways")


def positions() -> str:
    """Return the tail perplexities after training on each kind of positions, over several seeds."""
    result: dict[str, Any] = read(POSITIONS)
    untrained = {"before": next(iter(result["ways"].values()))["before"]}
    intro = f"Tail perplexity of the embedded Llama with `yarn:scale=4` after {result['steps']} steps of 2,048 tokens"
    return _of_ways(result, untrained, intro, "positions")


def short() -> str:
    """Return the tail perplexities after training on short blocks alone, and the time of a step."""
    result: dict[str, Any] = read(SHORT)
    untrained = {
        "no patch" if patch == "none" else f"`{patch}`, untrained": cells
        for patch, cells in result["untrained"].items()
    }
    intro = (
        "Tail perplexity of the embedded Llama (trained at 256 tokens) with `pi:scale=4`, after "
        f"{result['steps']} steps of 8 blocks of 256 tokens. The time of a step is CPU time of forward and backward, "
        "relative to the first row with a training"
    )
    return _of_ways(result, untrained, intro, "short", timed=True)


def smollm2() -> str:
    """Return what SmolLM2 reads and finds after training on short blocks alone, and untrained."""
    result: dict[str, Any] = read(SMOLLM2)
    columns = {"first 2,048": ("prefix", "2048"), "first 12,288": ("prefix", "12288")}
    columns["last 1,024 of these"] = ("tail", "12288")
    names = {"none": "no patch", "truncation": "no patch, `truncation`"}
    rows = {names.get(n, f"`{n}`, untrained"): [run] for n, run in result["untrained"].items()}
    rows |= {name: row["runs"] for name, row in result["ways"].items()}
    lines = []
    for name, runs in rows.items():
        cells = [_over_seeds(runs, [length], protocol)[0] for protocol, length in columns.values()]
        many = sum(run["keys"] for run in runs)
        found = [f"{sum(run[kind] for run in runs)} of {many}" for kind in ("answered", "first")]
        options = result["ways"].get(name, {}).get("options", ())
        lines.append([name, *cells, *found, f"`{' '.join(options)}`" if options else ""])
    header = ["way", *columns, "keys answered", "ranked first", "options"]
    intro = (
        f"SmolLM2-135M (8,192 tokens), {result['steps']} steps of one block of 1,024 tokens. Perplexity of the first "
        "12,288 tokens of five texts, and keys 8,192 to 12,288 tokens before the end of a prompt of 12,288"
    )
    return (
        f"{_of_seeds(result, intro, header, lines, 'smollm2')}\n\n{_found(result, rows, columns)}"
    )


def _found(
    result: Mapping[str, Any],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    columns: Mapping[str, tuple[str, str]],
) -> str:
    """Return what the table of `smollm2` shows, by ratios of mean perplexities."""

    def mean(name: str, protocol: str, length: str) -> float:
        return float(sum(run[protocol][length] for run in rows[name]) / len(rows[name]))

    def ratios(name: str, other: str) -> list[float]:
        return [mean(name, *each) / mean(other, *each) for each in columns.values()]

    def keys(*names: str) -> set[bool]:
        """Return whether all keys are found, or none, by each of some models."""
        found = [(run["answered"], run["keys"]) for name in names for run in rows[name]]
        assert all(answered in (0, asked) for answered, asked in found)
        return {answered > 0 for answered, _ in found}

    yarn, trained, plain = "`yarn:scale=2`, untrained", "yarn, blocks", "no patch, blocks"
    blocks, *drawn = pi = "pi, blocks", "pi, EndPrompt", "pi, PoSE, distilled from itself"
    taught, gained = ratios(plain, "no patch")[0], ratios(trained, yarn)[1]
    before, after = ratios(yarn, "no patch")[0], ratios(trained, plain)[0]
    distilled = ratios(f"{trained}, distilled", plain)[0]
    worse = [f"{min(r):.2f} to {max(r):.2f}" for r in (ratios(name, blocks) for name in drawn)]
    assert keys(yarn, trained) == {True}
    assert keys(plain, *pi) == {False}
    assert 1 < after < distilled < before
    return (
        "- **The text teaches more than the positions.** Training on Python code takes the unpatched model to "
        f"{taught:.3f} times its perplexity on short texts, and `yarn` to {gained:.3f} over all 12,288 tokens. `yarn` "
        "found every key before, and a model without a patch finds none after.\n"
        f"- `yarn` costs short texts {before:.3f} times the perplexity before the training. Of models trained alike, "
        f"it costs {after:.3f}, and {distilled:.3f} if distilled from the unpatched model: distillation gained "
        "nothing.\n"
        f"- `pi` still finds no key. EndPrompt has {worse[0]} times the perplexity of the same blocks at plain "
        f"positions, PoSE distilled from itself {worse[1]}.\n"
        f"- {result['steps'] * 1024:,} tokens are few: the papers' runs read thousands of times as many."
    )


def _of_ways(
    result: Mapping[str, Any],
    untrained: Mapping[str, Any],
    intro: str,
    group: str,
    *,
    timed: bool = False,
) -> str:
    """Return the table of a group of ways: the models before any training, and every way over the seeds.

    Without such models, the table has a column of the longest length before the training.
    """
    rows = result["ways"]
    lengths = list(next(iter(rows.values()))["before"]["tail"])
    before = [] if untrained else lengths[-1:]
    header = ["way", *(f"{int(n):,} before" for n in before), *(f"{int(n):,}" for n in lengths)]
    header += [*(["time of a step"] * timed), "options"]
    lines = [
        [name, *_over_seeds([cells], lengths), *([""] * timed), ""]
        for name, cells in untrained.items()
    ]
    plain = 0.0
    for name, row in rows.items():
        options = f"`{' '.join(row['options'])}`" if row["options"] else ""
        seconds = min(run.get("seconds_per_step", 0.0) for run in row["runs"])
        plain = plain or seconds
        ratio = [f"{seconds / plain:.1f}"] if timed else []
        cells = _over_seeds([row["before"]], before) + _over_seeds(row["runs"], lengths)
        lines.append([name, *cells, *ratio, options])
    return _of_seeds(result, intro, header, lines, group)


def conversions() -> str:
    """Return the tail perplexities before and after the rotation is dropped, also with a constant softmax scale."""
    result: dict[str, Any] = read(CONVERSIONS)
    rows = result["ways"]
    lengths = list(next(iter(rows.values()))["before"]["tail"])
    header = ["rotation", *(f"{int(length):,}" for length in lengths), "recipe"]
    lines = []
    for name, row in rows.items():
        recipe, runs = row["options"][-1], row["runs"]
        states = {"before": [row["before"]], "after": runs}
        for factor in runs[0].get("temperatures", {}):
            scaled = [run["temperatures"][factor] for run in runs]
            states[f"after, scores times {factor}"] = scaled
        for state, cells in states.items():
            values = _over_seeds(cells, lengths)
            lines.append(
                [f"{name}, {state}", *values, f"[{recipe}.yaml](../{RECIPES}/{recipe}.yaml)"]
            )
    intro = f"Tail perplexity of the embedded Llama, {result['steps']} steps (recipes have more)"
    return _of_seeds(result, intro, header, lines, "conversions")


def _over_seeds(
    runs: Sequence[Mapping[str, Any]], lengths: Sequence[str], protocol: str = "tail"
) -> list[str]:
    """Return the mean over the runs at every length; of several also the least and the greatest."""
    cells = []
    for length in lengths:
        every = [run[protocol][length] for run in runs]
        spread = f" ({number(min(every))}-{number(max(every))})" if len(every) > 1 else ""
        cells.append(f"{number(sum(every) / len(every))}{spread}")
    return cells


def _of_seeds(
    result: Mapping[str, Any], intro: str, header: list[str], lines: list[list[str]], group: str
) -> str:
    """Return a table below its introduction and the number of seeds."""
    seeds = {len(row["runs"]) for row in result["ways"].values()}
    many = (
        "one seed (small differences are not significant)"
        if seeds == {1}
        else f"mean (least-greatest) of {max(seeds)} seeds"
    )
    if len(seeds) > 1:
        many += ", a number alone of one seed"
    table, by = markdown_table(header, lines, numeric=True), made_with(result["environment"])
    numbers = ",".join(sorted({f"{r['seed']}" for w in result["ways"].values() for r in w["runs"]}))
    options = f"--group {group} --steps {result['steps']} --seeds {numbers}"
    command = f"python -m scripts.compare_finetuning --output {group}.json {options}"
    return f"{intro}, {many}.\n\n{table}\n\n{by}. To measure it again: `{command}`."


def _table(scores: PerplexityResult) -> str:
    cells = summary(scores.records)
    lengths = scores.settings.lengths
    columns = {f"{n:,}": at(cells, "tail", n, "perplexity").map(number) for n in lengths}
    return table(columns, "tail perplexity")


def _fence(text: str, language: str = "bash") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _printed(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
