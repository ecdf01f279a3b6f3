"""Conversations as tokens: only the assistant's own tokens have a loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.documents import Conversation, TokenizedDocument, UnreadableError

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers searches for it


def tokenize_conversation(conversation: Conversation, tokenizer: Any) -> TokenizedDocument:
    """Convert a conversation to tokens by the tokenizer's chat template.

    The template marks the assistant's tokens itself (`{% generation %}`). Otherwise they are the text that each of the
    assistant's messages adds to the prompt that requests it, with the end of the turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PosencError(
            f"{conversation.name} is a conversation, and this tokenizer has no chat template: give --tokenizer with "
            "the tokenizer of a chat model, or --column with a column of text."
        )
    if not tokenizer.is_fast:
        raise PosencError(
            f"{conversation.name} is a conversation, which needs a fast tokenizer; this one is written in Python."
        )
    try:
        ids, trained = _encode(conversation.messages, tokenizer)
    except (TemplateError, TypeError, KeyError) as error:
        reason = f"the chat template does not accept the messages ({one_line(error)})"
        raise UnreadableError(reason) from error
    if not any(trained):
        raise UnreadableError("no message is the assistant's")
    mask = torch.tensor(trained, dtype=torch.bool)
    return TokenizedDocument(conversation.name, torch.tensor(ids), None, None, trained=mask)


def _encode(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any
) -> tuple[list[int], Sequence[int] | np.ndarray[Any, Any]]:
    """Return the token ids, and for each of them if it is the assistant's."""
    if _MARKS_ASSISTANT.search(str(tokenizer.chat_template)):
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], encoded["assistant_masks"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, stops = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(starts), dtype=bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True
        )
        answered = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (text.startswith(answered) and answered.startswith(prompt)):
            raise UnreadableError(
                "the chat template renders a message otherwise when others follow; mark it by {% generation %}"
            )
        trained |= (starts >= len(prompt)) & (stops <= len(answered)) & (stops > starts)
    return encoded["input_ids"], trained
