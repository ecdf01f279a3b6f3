"""`hf-posenc finetune`: help, completion and checks of the options that `hf_posenc.training` reads."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from typer.core import TyperCommand

from hf_posenc.cli import early
from hf_posenc.cli.command import parameter, signed
from hf_posenc.evaluation.measuring.candidates import UNPATCHED
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.training import options
from hf_posenc.training.__main__ import run

ALL = "--help-all"
EPILOG = (
    f"{ALL} shows the rest. Every option of transformers' TrainingArguments works too: --gradient_checkpointing, "
    "--report_to, ..."
)


def finetune(context: typer.Context, **_: Any) -> None:
    """Fine-tune a model for a longer context, and measure it before and after.

    Without arguments: the embedded model, from 256 to 1,024 tokens, in one to three minutes. The same command
    resumes an interrupted run. For several processes: accelerate launch -m hf_posenc.training, with the same options.
    """
    given = options.read(context.args)
    if given.patch is not None and given.patch.strip().lower() != UNPATCHED:
        early.check_methods([given.patch])
    model = ModelOptions(model=given.model, tokenizer=given.tokenizer, attn=given.attn)
    early.check_model(model, weights=not given.dry_run)
    run(context.args)


class Finetune(TyperCommand):
    """The command: typer shows and completes its options, and `hf_posenc.training` reads them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks for names
            return super().parse_args(ctx, args)
        if {"--help", "-h", ALL} & {*args}:
            rest = {field.name for field, *_ in options.listed() if field.metadata["flag"].rank}
            for each in self.params:
                vars(each)["hidden"] = ALL not in args and each.name in rest
            return super().parse_args(ctx, ["--help"])
        ctx.args = list(args)
        return list(args)


_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
signed(finetune, finetune.__doc__, [_context, *(parameter(*each) for each in options.listed())])
OWN = {"cls": Finetune, "epilog": EPILOG}
"""Arguments of `typer.Typer.command`: this command reads its words itself."""
