"""Tokenizers of several kinds, and a model that copies: retrieval with it is 100 % or 0 % by construction."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hf_posenc.embedded import model_path
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

SAMPLE = [
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n",
    "There is an important info hidden inside a lot of irrelevant text. What is the pass key? 0123456789\n",
    "A special magic number is hidden within the following text. VAR ABCDE = VAR XYZ -a-b-c-d-e-f\n",
    prose(2000),
]


def trained(kind: str) -> Any:
    """A tokenizer of 400 tokens, trained on the spot.

    Kinds: `bpe` (as GPT-2), `metaspace` (as Llama 2: spaces are letters, one in front of a text), `unigram` (as T5),
    `words` (drops line ends and spaces).
    """
    backend: Any
    trainer: Any
    if kind == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    elif kind == "words":
        backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
        )
        trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"])
    else:
        empty = models.Unigram() if kind == "unigram" else models.BPE(byte_fallback=True)
        backend = Tokenizer(empty)
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        letters = [chr(code) for code in range(32, 127)] + ["\n"]
        options: Any = {"vocab_size": 400, "initial_alphabet": letters}
        trainer = (
            trainers.UnigramTrainer(**options, unk_token="<unk>", special_tokens=["<unk>"])
            if kind == "unigram"
            else trainers.BpeTrainer(**options)
        )
    backend.train_from_iterator(SAMPLE, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend)


TOKENIZERS: dict[str, Any] = {
    "bytes": byte_tokenizer,
    "bytes with bos": lambda: byte_tokenizer(bos=True),
    "embedded": lambda: AutoTokenizer.from_pretrained(model_path()),
    **{kind: partial(trained, kind) for kind in ("bpe", "metaspace", "unigram", "words")},
}


class Copier(nn.Module):
    """A causal model of bytes that continues as the text went on the last time that it had the same few bytes.

    With the passkey prompt, that is the pass key. It looks back `window` tokens, as a model may that was trained on so
    many, for `like` tokens that are the same. A text longer than `most` raises `error`.
    """

    def __init__(
        self, window: int = 10**9, like: int = 8, most: int = 10**9, error: Exception | None = None
    ) -> None:
        super().__init__()
        self.embedding, self.generation_config = nn.Embedding(VOCABULARY, 1), GenerationConfig()
        self.window, self.like, self.most, self.error = window, like, most, error
        self.config: Any = SimpleNamespace(max_position_embeddings=64, to_dict=dict)
        self.config.get_text_config = lambda: self.config
        self.read: list[int] = []  # the tokens of every forward

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        self.read.append(input_ids.shape[1])
        if input_ids.shape[1] > self.most:
            raise self.error or RuntimeError("too long for me")
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(max(0, len(ids) - 40), len(ids)):  # answers stand at the end
                logits[row, place, self._next(ids[: place + 1])] = 5.0
        return SimpleNamespace(logits=logits)

    def _next(self, ids: list[int]) -> int:
        known = "".join(map(chr, ids[-self.window :]))
        begin = known.rfind(known[-self.like :], 0, len(known) - 1)
        return 0 if begin < 0 else ord(known[begin + self.like])

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        ids = input_ids[0].tolist()
        for _ in range(max_new_tokens):
            ids.append(self._next(ids))
        return torch.tensor([ids])
