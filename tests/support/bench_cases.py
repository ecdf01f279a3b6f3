"""A tiny model and texts that a benchmark takes a second for."""

from __future__ import annotations

import json
from typing import Any

from hf_posenc.evaluation.bench import BenchResult, bench
from hf_posenc.files import to_json
from tests.support import zoo
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

LENGTHS = (64, 640)  # of 64 trained tokens; passkey's shortest prompt is in between
METHODS = ("none", "sliding_window", "yarn")
TEXTS = [prose(700 + 13 * n, n) for n in range(3)]
PASSKEY: dict[str, Any] = {"suite": "smoke", "lengths": LENGTHS, "tasks": ("passkey",)}


def tiny(**overrides: Any) -> Any:
    return zoo.build("llama", **{"vocab_size": VOCABULARY, "num_hidden_layers": 1, **overrides})


def measured(model: Any = None, **options: Any) -> BenchResult:
    """A benchmark of a random model, on all three texts."""
    given = {"methods": METHODS, **PASSKEY, "rounds": 1, **options}
    texts = given.pop("documents", TEXTS)
    return bench(tiny() if model is None else model, byte_tokenizer(), texts, **given)


def without_speed(result: BenchResult) -> str:
    """All that must be the same whenever the same is measured again, as it is written."""
    values = result.to_dict()
    del values["speed"]
    return to_json(values)


def edited(result: BenchResult, **changes: Any) -> BenchResult:
    """The same result with other values in its JSON."""
    values = json.loads(to_json(result.to_dict()))
    return BenchResult.from_dict({**values, **changes})
