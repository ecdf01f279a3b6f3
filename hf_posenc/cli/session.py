"""What most commands begin with: a model, its tokenizer, and what goes in front of a text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from hf_posenc.cli import loading
from hf_posenc.cli.inputs import TakesSeveral

EMBEDDED = "hf_posenc's embedded model"
_ARGUMENTS = "hf_posenc.arguments"
_WITH_A_VALUE = ("--output", "--shard", "--token-cache")
_NOT_PART_OF_THE_RESULT = (*_WITH_A_VALUE, "--plot", "--no-plot")


@dataclass(frozen=True)
class Session:
    """A loaded model.

    Attributes:
        name: As results show it.
        model: The model.
        tokenizer: Its tokenizer.
        embedded: Whether it is the one that ships with the package.
    """

    name: str
    model: Any
    tokenizer: Any
    embedded: bool


def open_session(
    model: str | None,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    attn: str | None = None,
) -> Session:
    """Loads a model and its tokenizer; without a name, the embedded ones, on one thread.

    Raises:
        PosencError: One of them cannot be loaded.
    """
    if model is None:
        loading.one_thread()
    name = model or loading.embedded_model()
    words = loading.load_tokenizer(tokenizer or name)
    live = loading.load_model(
        name, dtype=dtype, device=device, device_map=device_map, attention=attn
    )
    return Session(model or EMBEDDED, live, words, model is None)


class Remembers(TakesSeveral):
    """A command that can say how it was called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def command_line(context: Any) -> str:
    """The command that gives the same result again: without where it went, and who had which share."""
    given, kept = list(context.meta.get(_ARGUMENTS, ())), []
    while given:
        argument = given.pop(0)
        option, equals, _ = argument.partition("=")
        if option not in _NOT_PART_OF_THE_RESULT:
            kept.append(argument)
        elif option in _WITH_A_VALUE and not equals and given:
            given.pop(0)
    return shlex.join(["hf-posenc", context.info_name, *kept])
