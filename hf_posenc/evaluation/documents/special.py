"""The special tokens in front of a window."""

from __future__ import annotations

from typing import Any

from hf_posenc.errors import PosencError


def special_prefix(tokenizer: Any, policy: str) -> list[int]:
    """The special tokens that go in front of every window.

    Args:
        tokenizer: A transformers tokenizer.
        policy: `"auto"`, what the tokenizer itself puts in front of a text; `"always"`, its BOS token; `"never"`.

    Raises:
        PosencError: An unknown policy, or `"always"` with a tokenizer that has no BOS token.
    """
    if policy == "never":
        return []
    if policy == "always":
        if tokenizer.bos_token_id is None:
            raise PosencError(
                "--bos always: this tokenizer has no BOS token; use --bos auto or --bos never."
            )
        return [int(tokenizer.bos_token_id)]
    if policy != "auto":
        raise PosencError(f"Unknown BOS policy {policy!r}: auto, always or never.")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return [int(token) for token in special[:start]]
    return []
