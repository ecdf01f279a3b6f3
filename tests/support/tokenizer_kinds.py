"""Small tokenizers of every kind that the tokenizers library has, trained on the spot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# The pattern of cl100k_base and Llama 3.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ["<unk>", "<s>", "</s>"]
_SETTINGS: Any = {"vocab_size": 500, "show_progress": False, "special_tokens": _SPECIAL}
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTENCES = "naïve café 東京都は日本の首都です。 Привет мир 😀😀 éé 12345 67890\n\n  x\t\ty\n" * 20

Sequence = pre_tokenizers.Sequence
ByteLevel = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)


def _trained(
    model: Any, trainer: Any, cutter: Any = None, normalizer: Any = None, post: Any = None
) -> Any:
    backend: Any = Tokenizer(model)
    if cutter is not None:
        backend.pre_tokenizer = cutter
    if normalizer is not None:
        backend.normalizer = normalizer
    if post is not None:
        backend.post_processor = post
    code = Path(__file__).read_text(encoding="utf-8")
    backend.train_from_iterator([code, _SENTENCES], trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, unk_token="<unk>")


def _bpe(cutter: Any = None, normalizer: Any = None, post: Any = None, **options: Any) -> Any:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **_SETTINGS, **options)
    return _trained(models.BPE(unk_token="<unk>"), trainer, cutter, normalizer, post)


def _sentencepiece(cutter: Any, normalizer: Any, special: list[str]) -> Any:
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=bool(special))
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        show_progress=False,
        special_tokens=_SPECIAL + special,
        max_token_length=8,
        limit_alphabet=60,
    )
    return _trained(model, trainer, cutter, normalizer)


def _unigram(cutter: Any, normalizer: Any) -> Any:
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>", "<s>"], unk_token="<unk>"
    )
    return _trained(models.Unigram(), trainer, cutter, normalizer)


def _wordpiece() -> Any:
    trainer = trainers.WordPieceTrainer(**_SETTINGS)
    model = models.WordPiece(unk_token="<unk>")
    return _trained(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def _wordlevel() -> Any:
    trainer = trainers.WordLevelTrainer(**_SETTINGS)
    model = models.WordLevel(unk_token="<unk>")
    return _trained(model, trainer, pre_tokenizers.Whitespace(), normalizers.Lowercase())


def _suffixed() -> Any:
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    trainer = trainers.BpeTrainer(**_SETTINGS, end_of_word_suffix="</w>")
    return _trained(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_NO_REGEX = ByteLevel(use_regex=False)
_LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
_XLNET = normalizers.Sequence(
    [
        normalizers.Replace("``", '"'),
        normalizers.Replace(Regex(" {2,}"), " "),
        *(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()),
    ]
)
_DEEPSEEK = [_split(r"\p{N}{1,3}"), _split(r"[一-龥぀-ゟ゠-ヿ]+"), _split(_PATTERN), _NO_REGEX]

AT_TOKENS: dict[str, Callable[[], Any]] = {
    "byte-level BPE that nothing cuts": lambda: _bpe(_NO_REGEX, max_token_length=8),
    "Llama 2": lambda: _sentencepiece(None, _LLAMA, _BYTES),
    "Gemma": lambda: _sentencepiece(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁"), _BYTES
    ),
    "BPE with Metaspace and unknown characters": lambda: _sentencepiece(
        pre_tokenizers.Metaspace(), None, []
    ),
    "BPE with a suffix for words": _suffixed,
}
"""Kinds whose texts may be cut at any token."""

AT_WORDS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: _bpe(ByteLevel(), post=processors.ByteLevel(trim_offsets=True)),
    "Llama 3": lambda: _bpe(Sequence([_split(_PATTERN), _NO_REGEX]), normalizers.NFC()),
    "DeepSeek": lambda: _bpe(Sequence(_DEEPSEEK)),
    "StarCoder": lambda: _bpe(
        Sequence([pre_tokenizers.Digits(individual_digits=True), ByteLevel()])
    ),
    "WordPiece": _wordpiece,
    "WordLevel": _wordlevel,
    "Unigram with Metaspace": lambda: _unigram(pre_tokenizers.Metaspace(), normalizers.NFKC()),
    "XLNet": lambda: _unigram(
        Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), _XLNET
    ),
}
"""Kinds whose texts may be cut where a word begins."""

NEVER: dict[str, Callable[[], Any]] = {
    "Unigram that nothing cuts": lambda: _unigram(None, normalizers.NFKC()),
    "a phase counted from the beginning": lambda: _bpe(
        Sequence([pre_tokenizers.FixedLength(5), pre_tokenizers.Digits(individual_digits=True)])
    ),
    "a pattern that looks ahead without end": lambda: _bpe(_split(r"\w+(?=.*!)|\s+|.")),
    "a pattern that looks back": lambda: _bpe(_split(r"(?<=a[^b]{1,9})\w+|\s+|.")),
    "a pattern that counts far": lambda: _bpe(_split(r"[\s\S]{1,4096}")),
}
"""Kinds of which nothing is known."""


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """The tokenizer of a kind; each is made once."""
    return {**AT_TOKENS, **AT_WORDS, **NEVER}[kind]()
