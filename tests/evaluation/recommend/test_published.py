"""The published tables, and the digest of them that comes with the package."""

from __future__ import annotations

import math
import re
from typing import Any

from hf_posenc.evaluation.perplexity.protocols import AGGREGATES, PROTOCOLS
from hf_posenc.evaluation.recommend.options import (
    TOLERANCE,
    Evidence,
    evidence_of,
    summary,
    verdict,
)
from hf_posenc.methods import get_method
from scripts.results import EVIDENCE, TRANSCRIBED, evidence, read

TABLES: dict[str, Any] = {table["id"]: table for table in read(TRANSCRIBED)["tables"]}


def printed(id: str, method: str, column: int) -> Any:
    """A number as printed, of the first row with this method."""
    row = next(row for row in TABLES[id]["rows"] if row["method"] == method)
    return row["values"][TABLES[id]["columns"].index(column)]


def test_the_tables_are_whole() -> None:
    assert len(TABLES) == len(read(TRANSCRIBED)["tables"]) > 40
    for table in TABLES.values():
        protocol, columns = table["protocol"], table["columns"]
        assert table["metric"] in ("perplexity", "loss", "accuracy", "tokens")
        assert protocol["name"] in (None, *PROTOCOLS, "passkey", "niah", "ruler")
        assert protocol.get("aggregate") in (None, *AGGREGATES)
        assert ("stride" in protocol) == (protocol["name"] in ("sliding", "stream"))
        assert ("tail_tokens" in protocol) == (protocol["name"] == "tail")
        assert table["source"].keys() & {"arxiv", "url", "repo"}
        assert {len(row["values"]) for row in table["rows"]} == {len(columns)}
        for value in (value for row in table["rows"] for value in row["values"]):
            if isinstance(value, str):
                assert re.fullmatch(r">1e\d|OOM|\d+k", value)
            assert value is None or isinstance(value, int | float | str)
        if table["column_kind"] == "context length":
            assert columns == sorted({int(column) for column in columns})


def test_numbers_as_printed() -> None:
    assert printed("dca-t1-pg19", "ReRoPE", 8192) == 7.75
    assert printed("dca-t1-pg19", "ReRoPE", 16384) == "OOM"
    assert TABLES["yarn-t1"]["rows"][2]["values"][-1] == 6.04
    for column, perplexity in ((4096, 5.61), (16384, 550.0)):
        assert printed("pose-t6-govreport", "NTK, no fine-tuning (16k)", column) == perplexity


def held_and_broke(id: str, model: str, method: str) -> list[float | None]:
    """The multiples of the trained length, where the unpatched model is best, up to which a row stays within 25 %."""
    table = TABLES[id]

    def points(label: str) -> dict[Any, float]:
        rows = (r for r in table["rows"] if (r["model"], r["method"]) == (model, label))
        values = zip(table["columns"], next(rows)["values"], strict=True)
        known = {c: v for c, v in values if v not in (None, "OOM")}  # memory proves nothing
        numbers = {c: math.inf if isinstance(v, str) else v for c, v in known.items()}
        return {c: math.exp(v) if table["metric"] == "loss" else v for c, v in numbers.items()}

    plain, held = points("none"), 0.0
    trained = max(length for length in plain if plain[length] == min(plain.values()))
    for length, value in points(method).items():
        if length >= trained and value > TOLERANCE * plain[trained]:
            return [held, length / trained]
        held = length / trained if length >= trained else held
    return [held, None]


def test_the_digest_is_what_the_tables_say() -> None:
    assert EVIDENCE.read_text(encoding="utf-8") == evidence()
    rows = read(TRANSCRIBED)["untrained"]
    assert rows == {
        get_method(method).name: [[*row[:3], *held_and_broke(*row[:3])] for row in own]
        for method, own in rows.items()
    }
    found = [(one.held, one.broke) for one in evidence_of("ntk")]
    assert found == [(4, 8), (4, 8), (4, None), (4, None)]  # 5.8 / 4.74, then 550 / 4.74


def test_a_verdict_is_for_a_multiple_of_the_trained_length() -> None:
    ntk = evidence_of("ntk")
    assert [verdict(ntk, factor) for factor in (4, 8, 6)] == [1, -1, 0]
    assert verdict((), 2) == 0
    one = Evidence("a-t1", "Llama", 4.0, None)
    assert summary([one], 2) == "published, untrained: held at x4 (Llama, a-t1)"
    assert summary([one], 5).endswith("(Llama, a-t1), x5 is beyond what was measured")
    assert "held at x4" in summary(ntk, 2)
    assert "not at x8 (LLaMA-7B, pose-t6-govreport)" in summary(ntk, 2)
    assert summary((), 2) == "published, untrained: nothing"
