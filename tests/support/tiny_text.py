"""A tokenizer of single bytes, and tiny checkpoints that read with it, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import zoo

VOCABULARY = 257  # <s> and the bytes


def byte_tokenizer(*, bos: bool = False) -> Any:
    """Token i+1 is the i-th character of GPT-2's byte alphabet; `bos` puts `<s>` in front of a text, as Llama does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, bos_token="<s>")


def sizes(
    vocabulary: int, length: int, *, width: int, layers: int, heads: tuple[int, int]
) -> dict[str, Any]:
    """Return the fields of a small Llama's config; `heads` are those of queries and of keys."""
    return {
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
    }


def tiny(**overrides: Any) -> Any:
    """A random Llama of one layer and 64 trained positions, for the tokens of `byte_tokenizer`."""
    return zoo.build("llama", **{"vocab_size": VOCABULARY, "num_hidden_layers": 1, **overrides})


def tiny_checkpoint(
    folder: Path, model_type: str = "llama", *, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Writes a random model of 64 trained positions, and the tokenizer."""
    config = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, **overrides}
    zoo.build(model_type, **config).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def text_files(folder: Path, count: int, size: int = 300, step: int = 0) -> Path:
    """Writes texts of so many characters, each longer by a step than the one before."""
    folder.mkdir(exist_ok=True)
    for seed in range(count):
        (folder / f"{seed}.txt").write_text(prose(size + step * seed, seed))
    return folder


def prose(size: int, seed: int = 0) -> str:
    """So many characters of text with repetitions, different for every seed."""
    words = ("scale", "window", "theta", "token", "phase", "rotary", "length", "factor", "\n")
    text: list[str] = []
    state, written = seed * 7919 + 1, -1
    while written < size:
        state = (state * 1103515245 + 12345) % 2**31
        text.append(words[(state >> 16) % len(words)])
        written += len(text[-1]) + 1
    return " ".join(text)[:size].rstrip().ljust(size, ".")
