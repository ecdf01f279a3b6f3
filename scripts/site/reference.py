"""Reference pages: the line `<!-- site: NAME WORDS -->` of a page stands for what a function here returns."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hf_posenc.cli.inspection import recipe_table
from hf_posenc.cli.methods import kinds
from hf_posenc.errors import unknown
from hf_posenc.evaluation.grid import Grid, escaped, markdown_table, to_markdown
from hf_posenc.methods import METHODS, Method
from scripts.results import TRANSCRIBED, read

MARKER = re.compile(r"^<!-- site: (?P<name>\w+)(?: (?P<words>[^\n]*?))? -->$", re.M)


def filled(markdown: str) -> str:
    """Return the Markdown of a page with every marker replaced."""

    def content(match: re.Match[str]) -> str:
        if match["name"] not in CONTENT:
            raise unknown("content", match["name"], CONTENT)
        return CONTENT[match["name"]](*(match["words"] or "").split())

    return MARKER.sub(content, markdown)


def public_names(module: str) -> tuple[str, ...]:
    """Return the public names of a module: functions first, then classes and constants, each in its order."""
    home = importlib.import_module(module)
    return tuple(sorted(home.__all__, key=lambda name: not inspect.isfunction(getattr(home, name))))


def api(*names: str) -> str:
    """Document objects by their paths, and all public names of a module that has `__all__`."""
    paths: list[str] = []
    for name in names:
        try:
            paths += (f"{name}.{each}" for each in public_names(name))
        except (ImportError, AttributeError):
            paths.append(name)
    return "\n\n".join(map(_document, paths))


def section(module: str, *names: str) -> str:
    """Document names of a module below a heading and the first paragraph of its docstring; by default `__all__`."""
    about = inspect.cleandoc(importlib.import_module(module).__doc__ or "").partition("\n\n")[0]
    paths = [f"{module}.{name}" for name in names or public_names(module)]
    return "\n\n".join([f"## `{module}`", about, *(_document(path, 3) for path in paths)])


def _document(path: str, level: int = 2, members: bool = True) -> str:
    """Return the directive of mkdocstrings for an object."""
    options = {"heading_level": level, **({} if members else {"members": "false"})}
    lines = [f"        {key}: {value}" for key, value in options.items()]
    return "\n".join([f"::: {path}", "    options:", *lines])


def methods() -> str:
    """Document the classes of the methods by kind, and then the other public names of their package."""
    parts = []
    for title, group in kinds().items():
        parts.append(f"## {title.partition(':')[0]}")
        for m in group:
            parts.append(_document(_path(m), 3, members=False))
            page = f"[The page of `{m.name}`](../methods/{m.name}.md)"
            parts.append(f"{page}: equation, picture, measurements and an example.")
    named = {method.__name__ for method in METHODS}
    others = [name for name in public_names("hf_posenc.methods") if name not in named]
    parts.append("## Base classes and functions")
    parts += [_document(f"hf_posenc.methods.{name}", 3) for name in others]
    return "\n\n".join(parts)


def with_class(markdown: str, page: str) -> str:
    """Return the Markdown of a method's page with a link to its class in the reference; any other as it is."""
    for method in METHODS:
        if page == f"methods/{method.name}.md":
            return f"{markdown.rstrip()}\n\nIn Python: [`hf_posenc.methods.{method.__name__}`][{_path(method)}].\n"
    return markdown


def _path(method: type[Method]) -> str:
    return f"{method.__module__}.{method.__name__}"


def cli() -> str:
    """Document every command: its help, and its arguments and options by panel with their defaults."""
    from typer.main import get_command

    from hf_posenc.cli.app import app

    root: Any = get_command(app)
    # The command `methods` has no option of its own.
    everywhere = [_option(parameter) for parameter in root.commands["methods"].params]
    parts = [markdown_table(["Options of every command", "Meaning"], everywhere)]
    for name, command in root.commands.items():
        parts += _command(name, command, everywhere)
    return "\n\n".join(parts)


def _command(name: str, command: Any, elsewhere: Collection[list[str]]) -> Iterator[str]:
    arguments = [_shown(p) for p in command.params if p.param_type_name == "argument"]
    yield f"## hf-posenc {name}"
    yield _escaped(command.help or "")
    yield f"```text\nhf-posenc {' '.join([name, *arguments, '[OPTIONS]'])}\n```"
    panels: dict[str, list[list[str]]] = {}
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        panel = "Arguments" if argument else parameter.rich_help_panel or "Options"
        if (fields := _option(parameter)) not in elsewhere:
            panels.setdefault(panel, []).append(fields)
    for panel, rows in panels.items():
        yield markdown_table([panel, "Meaning"], rows)


def _option(parameter: Any) -> list[str]:
    """Return name and meaning of a parameter, the meaning with the default unless it names that itself."""
    if isinstance(parameter.show_default, str):  # in words
        default = _escaped(parameter.show_default)
    elif isinstance(parameter.default, bool):
        default = f"`{parameter.opts[0]}`" if parameter.default else ""
    elif parameter.default is None or callable(parameter.default):
        default = ""
    else:
        default = f"`{parameter.default}`"
    meaning = _escaped(parameter.help or "")
    return [f"`{_shown(parameter)}`", f"{meaning} *Default: {default}.*" if default else meaning]


def _shown(parameter: Any) -> str:
    """Return a parameter as the help names it."""
    if parameter.param_type_name == "argument":
        name = parameter.name.upper()
        return str(parameter.metavar or (name if parameter.required else f"[{name}]"))
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'VALUE'}"


def _escaped(text: str) -> str:
    """Escape a help text for a table; what is between backticks is code there too."""
    return escaped(text).replace("\\`", "`")


def recipes() -> str:
    """Document the published patches: the table of `hf-posenc recipes`, then source and content of each."""
    from hf_posenc.adapters import available_recipes, get_recipe, native_models

    names = available_recipes()
    rows = []
    for name in names:
        about = get_recipe(name)["recipe"]
        rows.append([f"`{name}`", escaped(about["description"]), escaped(about["source"])])
    native = [[escaped(one["name"]), escaped(one["source"])] for one in native_models()]
    parts = [
        to_markdown(recipe_table(names)),
        *("## Sources", markdown_table(["recipe", "what it is", "source"], rows)),
        "## Models that need nothing",
        "These were trained on long texts and need no scaling.",
        markdown_table(["model", "source"], native),
    ]
    return "\n\n".join(parts)


def published_tables() -> str:
    """Document every published table, as printed."""
    return "\n\n".join(part for table in read(TRANSCRIBED)["tables"] for part in _published(table))


def _published(table: Mapping[str, Any]) -> Iterator[str]:
    yield f"## `{table['id']}`"
    source, protocol = table["source"], table["protocol"]
    home = source.get("url") or f"github.com/{source.get('repo')}, {source.get('path')}"
    origin = f"arXiv {source['arxiv']}" if "arxiv" in source else home
    names = {"name": "protocol", "aggregate": "mean over", "tail_tokens": "tail tokens"}
    facts = [f"{names.get(k, k)}: {v}" for k, v in protocol.items() if v and k != "note"]
    note = f" ({table['metric_note']})" if "metric_note" in table else ""
    about = f" {', '.join(facts).capitalize()}." if facts else ""
    head = f"{table['paper']}, {table['table']}: {table['dataset']}. Read in {origin}."
    yield escaped(f"{head} Values: {table['metric']}{note}, by {table['column_kind']}.{about}")
    yield from map(escaped, filter(None, (protocol.get("note"), table.get("caveat"))))
    grid = Grid.of("", "model", "method")
    for column in table["columns"]:
        grid.column(f"{column:,}" if isinstance(column, int) else column, numeric=True)
    for row in table["rows"]:
        values = ("-" if v is None else f"{v:g}" if v != str(v) else v for v in row["values"])
        at = f", evaluated at {row['window']:,}" if "window" in row else ""
        grid.row(row["model"], row["method"] + at, *values)
    yield to_markdown(grid)


CONTENT: dict[str, Callable[..., str]] = {
    "api": api,
    "cli": cli,
    "methods": methods,
    "published": published_tables,
    "recipes": recipes,
    "section": section,
}
