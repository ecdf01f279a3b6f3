"""The scorer on every family of transformers of which a tiny model can be built.

Head replay gives the very bits of the full logits; a prefill in pieces gives the numbers of one forward, or is refused
with a reason; what reads ahead is no language model to it. The tables name every exception. Representative types run
always, all others with `-m slow`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import without_cache
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.evaluation.scoring.test_head_replay import expected_losses
from tests.support import zoo
from tests.support.selection import quick
from tests.support.zoo import CACHE
from tests.support.zoo_registry import causal_lm_types, config_class_of, quiet

ROTARY = (*zoo.decoder_types(), *zoo.text_tower_types(), *zoo.composite_types())
OTHERS = tuple(sorted({*causal_lm_types()} - {*ROTARY, *zoo.NOT_BUILT}))
"""Causal language models without rotary positions."""

NOT_BUILT = {
    **dict.fromkeys(("musicgen", "musicgen_melody"), "their configs are of three models in one"),
    "reformer": "its axial positions want a width and a length of their own",
}
READS_AHEAD = {
    "cpmant": "the prompt that it learned reads the text in both directions",
    "diffusion_gemma": "a diffusion model: no logits for every token",
    "paligemma": "reads a prompt in both directions",
    "xlnet": "a permutation language model",
}
"""Types that are not causal language models; BERT and similar encoders are built as decoders here."""

OFF = r"nats a token off those of one forward"
WHOLE_ONLY: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("falcon_mamba", "jamba", "mamba", "zamba"),
        (OFF, "a scan of several tokens starts from zero, whatever state is cached"),
    ),
    **dict.fromkeys(
        ("unlimited_ocr", "unlimited_ocr_text"),
        (OFF, "all tokens see the prompt, and the first piece passes for it"),
    ),
    "blt": ("num_hidden_layers", "cannot make its cache from its own config"),
    "kyutai_speech_to_text": (OFF, "its forward ignores the window that its cache keeps to"),
    "openai-gpt": ("returns no cache", "has none"),
    "prophetnet": ("shape", "reads on from a cache one token at a time"),
    "recurrent_gemma": ("returns no cache", "keeps its states in its modules"),
    "xlm": ("returns no cache", "does not return it"),
}
"""Types that cannot be prefilled in pieces: a part of the message, and the cause in their code."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},  # else none of 4 layers attends
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "xlm": {"causal": True},
    "xlstm": {"qk_dim_factor": 1.0},  # its config rounds up to widths of 64, its layers do not
    "xmod": {"default_language": "en_XX"},
}
INDEX_HEADS = 16
"""Sparse attention ranks keys by a sum of ReLUs. With the 2 heads of a tiny model, a quarter of the keys get exactly 0,
and which of them are selected is undefined; the real models have 32 or more."""

PIECES = (7, 20)
"""Below and above the tiny windows of 8; four pieces of 7 leave one of 29 tokens alone."""
IDS = zoo.tokens(29)[0]
# One for each kind of cache, and each way from the decoder to the logits.
FAST = {"llama", "gemma3", "gpt_oss", "gpt_neox", "deepseek_v2", "bert", "granite4_vision_text"}
FAST |= {"mamba", "rwkv", "qwen3_next", "prophetnet", "gemma2", "bloom", "mixtral"}


class Wrapped(nn.Module):
    """Supplies a model's required inputs beside tokens, and a head to a model without one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.head = nn.Linear(64, 128).requires_grad_(False)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_experts_implementation(self, name: str) -> None:
        self.model.set_experts_implementation(name)

    def forward(
        self, input_ids: Tensor, position_ids: Any = None, cache: Any = None, **more: Any
    ) -> Any:
        given = {"position_ids": position_ids, CACHE: cache, **more}
        given = {name: value for name, value in given.items() if value is not None}
        output = self.model(**zoo._required_inputs(self.config, input_ids), **given)
        if getattr(output, "logits", None) is not None:
            return output
        cached = {CACHE: getattr(output, CACHE)}
        return CausalLMOutputWithPast(logits=self.head(output.last_hidden_state), **cached)


def build(model_type: str, **overrides: Any) -> Any:
    config = zoo.tiny_config(model_type, **OVERRIDES.get(model_type, {}), **overrides)
    if model_type in OTHERS and hasattr(config, "is_decoder"):
        config.is_decoder = True
    text: Any = config.get_text_config(decoder=True)
    if hasattr(text, "index_n_heads"):
        text.index_n_heads = INDEX_HEADS
    model = zoo.from_config(config)
    return Wrapped(model) if model_type in zoo.text_tower_types() else model


@torch.no_grad()
def full_logits(model: Any) -> Tensor:
    with quiet():
        logits: Tensor = model(input_ids=IDS[None], **without_cache(model)).logits[0]
    return logits


def scored(model: nn.Module, **options: Any) -> tuple[Tensor, str | None]:
    """Return the losses, and the reason if they were not computed in pieces."""
    with quiet():
        scorer = TokenScorer(model, IDS, chunk=16, **options)
        assert scorer.replays
        return scorer(IDS), scorer.refused


def keep_double(patch: pytest.MonkeyPatch) -> None:
    """Keep double precision where a model's code casts to single precision, as many do within a layer."""
    to, single = Tensor.to, Tensor.float

    def kept(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return to(self, *args, **kwargs)

    patch.setattr(Tensor, "to", kept)
    double = torch.float64
    patch.setattr(Tensor, "float", lambda self: self if self.dtype == double else single(self))


def check_pieces(model: Any, expected: Tensor, size: int, patch: pytest.MonkeyPatch) -> None:
    """Require the losses of one forward up to rounding; amplified rounding must vanish in double precision."""
    losses, refused = scored(model, prefill=size)
    assert refused is None
    off = float((losses - expected).abs().max())
    if off > 1e-5:
        assert off < 5e-3
        model.set_experts_implementation("eager")  # the others do not support doubles
        with patch.context() as inside:
            keep_double(inside)
            model.double()
            doubles = expected_losses(full_logits(model), IDS)
            losses, refused = scored(model, prefill=size)
        model.float()
        assert refused is None
        in_double = float((losses - doubles).abs().max())
        assert in_double < 1e-5, f"{off:.1e}, and {in_double:.1e} in double precision"


EVERY = tuple(t for t in (*ROTARY, *OTHERS) if t not in {*NOT_BUILT, *READS_AHEAD})


@pytest.mark.parametrize("model_type", quick(EVERY, always=FAST))
def test_every_type(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(model_type)
    logits = full_logits(model)
    expected = expected_losses(logits, IDS)
    with quiet():
        scorer = TokenScorer(model, IDS, chunk=16)
        losses = scorer(IDS)
    assert scorer.replays
    assert scorer.exact
    assert torch.equal(losses, F.cross_entropy(logits[:-1], IDS[1:], reduction="none").double())
    torch.testing.assert_close(losses, expected, atol=5e-6, rtol=5e-6)
    if model_type in WHOLE_ONLY:
        whole, refused = scored(model, prefill=PIECES[0])
        assert torch.equal(whole, losses)
        assert re.search(WHOLE_ONLY[model_type][0], str(refused)), refused
        return
    for size in PIECES:
        check_pieces(model, expected, size, monkeypatch)


def is_encoder(model_type: str) -> bool:
    """Return whether the type is one, unless its config makes it a decoder."""
    if model_type in {*NOT_BUILT, "trocr"}:  # TrOCR's reads the text in one direction in any case
        return False
    with quiet():
        fields = vars(config_class_of(model_type)())
    return "is_decoder" in fields and not fields.get("is_encoder_decoder")


ENCODERS = tuple(filter(is_encoder, OTHERS))
NOT_CAUSAL = r"is not causal|not return logits for every"
# A type, the class of transformers that builds it unless `build` does, and what is said of it.
REFUSED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(READS_AHEAD, (None, NOT_CAUSAL)),
    **dict.fromkeys(ENCODERS, (None, "is_decoder=True")),
    **dict.fromkeys(("t5", "bart"), (AutoModelForSeq2SeqLM, "is an encoder-decoder: .* needs a c")),
    "whisper": (AutoModelForSpeechSeq2Seq, "is an encoder-decoder: .* needs a causal"),
    "modernbert": (AutoModelForMaskedLM, "ModernBertForMaskedLM is not causal"),
}


@pytest.mark.parametrize("model_type", quick(REFUSED, always={*REFUSED} - {*ENCODERS} | {"bert"}))
def test_what_is_no_causal_language_model_is_refused(model_type: str) -> None:
    auto, message = REFUSED[model_type]
    with quiet():
        config = zoo.tiny_config(model_type, **OVERRIDES.get(model_type, {}))
        if auto is not None:
            model = auto.from_config(config).eval()
        elif model_type in ENCODERS:
            config.is_decoder = False
            model = zoo.from_config(config)
        else:
            model = build(model_type)
        with pytest.raises(PosencError, match=message):
            TokenScorer(model, IDS)


@pytest.mark.parametrize(
    "model_type",
    quick(
        ("llama", "gemma2", "gpt_neox", "gpt_oss", "deepseek_v3", "qwen3_next", "bamba", "mamba"),
        always=("llama", "bamba", "mamba"),
    ),
)
def test_half_precision(model_type: str) -> None:
    """Replay is bit-identical; pieces differ by rounding, or are refused."""
    model = build(model_type).bfloat16()
    logits = full_logits(model)
    losses, _ = scored(model)
    expected = F.cross_entropy(logits[:-1].float(), IDS[1:], reduction="none").double()
    assert torch.equal(losses, expected)
    pieces, refused = scored(model, prefill=20)
    assert (refused is not None) == (model_type in WHOLE_ONLY)
    assert float((pieces - losses).abs().mean()) < (0.1 if refused is None else 1e-9)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("float16", (128, 6, 16)), ("float32", (32, 2, 4)), ("float64", (32, 2, 4))],
)
def test_a_lost_state_that_matters_little(dtype: str, sizes: tuple[int, int, int]) -> None:
    """Losses are off by less than rounding does elsewhere, and by more than it does in this model."""
    names = ("hidden_size", "num_hidden_layers", "state_size")
    torch.manual_seed(0)
    values: dict[str, Any] = dict(zip(names, sizes, strict=True))
    config = MambaConfig(vocab_size=128, **values)
    model = MambaForCausalLM(config).eval().to(getattr(torch, dtype))
    scorer = TokenScorer(model, ids := zoo.tokens(129)[0], prefill=64)
    scorer(ids)
    assert re.search(OFF, str(scorer.refused))


def test_the_tables_name_types_that_are_tested() -> None:
    assert {*WHOLE_ONLY, *FAST, *OVERRIDES} <= {*EVERY}
    assert {*NOT_BUILT, *READS_AHEAD} <= {*ROTARY, *OTHERS}


def test_the_page_names_every_exception() -> None:
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    for model_type in (*WHOLE_ONLY, *READS_AHEAD, *NOT_BUILT):
        assert f"`{model_type}`" in page, model_type
    groups = (zoo.decoder_types(), zoo.text_tower_types(), zoo.composite_types(), OTHERS)
    for group in groups if "transformers 5.24" in page and CACHE == "cache" else ():
        tested = sum(t in EVERY for t in group)
        pieces = sum(t in EVERY and t not in WHOLE_ONLY for t in group)
        assert f"| {tested} | {tested} | {pieces} |" in page
