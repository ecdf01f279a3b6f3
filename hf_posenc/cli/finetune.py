"""`hf-posenc finetune`: help, completion and checks of the options that `hf_posenc.training.run` reads."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hf_posenc.cli import early
from hf_posenc.cli.command import completion, signed
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.training.run import options, run

ALL = "--help-all"
EPILOG = f"{ALL} shows the rest. {options.OTHERS} Names may be written with dashes."
_METAVARS = {int: "N", float: "X", options.Length: "TOKENS", str: "NAME"}


def finetune(context: typer.Context, **_: Any) -> None:
    """Fine-tune a model for a longer context, and measure it before and after.

    Without arguments: the embedded model, from 256 to 1,024 tokens, in about two minutes. The same command resumes an
    interrupted run. For several processes: accelerate launch -m hf_posenc.training, with the same options.
    """
    given = options.read(context.args)
    if given.patch is not None and given.patch.strip().lower() != options.UNPATCHED:
        early.check_methods([given.patch])
    model = ModelOptions(model=given.model, tokenizer=given.tokenizer, attn=given.attn)
    early.check_model(model, weights=not given.dry_run)
    run(context.args)


class Finetune(TyperCommand):
    """The command, whose words typer shows and completes; what they mean is for `hf_posenc.training.run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks for names
            return super().parse_args(ctx, args)
        if {"--help", "-h", ALL} & {*args}:
            shown = {field.name for field, _ in options.listed() if field.metadata["shown"]}
            for option in self.params:
                option.hidden = ALL not in args and option.name not in shown  # type: ignore[attr-defined]
            return super().parse_args(ctx, ["--help"])
        ctx.args = list(args)
        return ctx.args


def _parameters() -> list[inspect.Parameter]:
    """Return the options for typer, in their groups."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    made = [inspect.Parameter("context", keyword, annotation=typer.Context)]
    for field, about in options.listed():
        switch, choices = "const" in about, about.get("choices", ())
        few = "|".join(choices) if len(choices) < 4 else "NAME"
        info = typer.Option(
            f"--no_{field.name}" if field.default is True else f"--{field.name}",
            metavar=None if switch else few or _METAVARS[about["type"]],
            help=field.metadata["help"],
            show_default=not switch and field.default is not None,
            rich_help_panel=field.metadata["group"],
            autocompletion=completion(field.name, choices),
        )
        hint: Any = Annotated[bool if switch else str | None, info]
        default = about["default"] if switch else str(about["default"] or "") or None
        made.append(inspect.Parameter(field.name, keyword, default=default, annotation=hint))
    return made


signed(finetune, finetune.__doc__, _parameters())
