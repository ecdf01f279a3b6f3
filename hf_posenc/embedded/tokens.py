"""From the corpus to batches: the tokenizer, the token stream, and which part of it a step reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_posenc.embedded.corpus import Corpus
from hf_posenc.errors import PosencError

__all__ = ["END_OF_TEXT", "Batches", "token_stream", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"  # id 0: between documents; bos, eos and pad at once


def train_tokenizer(corpus: Corpus, vocab_size: int, characters: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: no normalization, no unknown token, so decoding gives the text back.

    Args:
        corpus: what to train it on.
        vocab_size: entries, the 256 bytes and the special token among them.
        characters: about how much of the corpus to read; every k-th file is.

    Returns:
        The tokenizer. Encoding adds no special token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stride = max(1, sum(len(text) for *_, text in corpus.files) // characters)
    tokenizer.train_from_iterator((text for *_, text in corpus.files[::stride]), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def token_stream(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> npt.NDArray[np.uint16]:
    """Token ids of the whole corpus, shape (n,), with an end-of-text token after every file."""
    encode = tokenizer.backend_tokenizer.encode
    end = tokenizer.eos_token_id
    parts = [np.array([*encode(text).ids, end], np.uint16) for *_, text in corpus.files]
    return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a run: what a step reads is a function of its number and the seed alone.

    The stream is cut into blocks at an offset that differs from epoch to epoch, and the blocks of an
    epoch are read in a seeded random order.

    Args:
        tokens: the stream, shape (n,).
        context: tokens per sequence; a sequence carries one more, as the last target.
        size: sequences per batch.
        seed: of offsets and orders.

    Raises:
        PosencError: the stream is too short for one batch.
    """

    tokens: npt.NDArray[np.uint16]
    context: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.blocks < self.size:
            raise PosencError(
                f"The corpus has {len(self.tokens)} tokens, too few for one batch of {self.size} x "
                f"{self.context}. Install more packages, or raise the limit per source."
            )

    @property
    def blocks(self) -> int:
        """Blocks in one epoch; the offset and the last target are kept free."""
        return (len(self.tokens) - 1 - self.context) // self.context

    def __getitem__(self, step: int) -> npt.NDArray[np.int64]:
        """The sequences of one step, shape (size, context + 1)."""
        epoch, position = divmod(step, self.blocks // self.size)
        rng = np.random.default_rng((self.seed, epoch))
        offset = rng.integers(self.context)
        order = rng.permutation(self.blocks)[position * self.size : (position + 1) * self.size]
        starts = offset + order * self.context
        return np.stack([self.tokens[s : s + self.context + 1] for s in starts]).astype(np.int64)
