"""The README and the pages: generated parts are up to date, links lead somewhere, and every block of code runs.

The blocks of a page run in order, in one folder that holds what they name (`folder`). The models there are tiny and
know 64 positions instead of 4,096, so lengths in the code are divided by 64. A command runs with `--dry-run` if it has
that. What follows `<!-- not run: REASON -->`, or has one of the options of `<!-- not run (OPTION, ...): REASON -->`, is
only checked: names, keyword arguments and options of hf_posenc in it exist. So is a block in a generated part, which
its generator runs.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import RobertaConfig, RobertaForMaskedLM, XGLMConfig, XGLMForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

from hf_posenc.cli.app import app
from hf_posenc.methods import METHODS, ReRoPE
from scripts import make_readme, method_pages
from scripts.site import links
from tests.support.tiny_text import prose, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = [ROOT / "docs", ROOT / "docs" / "concepts", ROOT / "docs" / "methods"]
PAGES += [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>not run|command)(?: \((?P<options>[^)\n]+)\))?: [^\n]+ -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)
LAUNCHER = re.compile(
    r"(accelerate launch( --(?!no_)\w+ \S+)*( --no_python)?|torchrun --nproc-per-node \d+( --no-python)?|python) "
)
SMALLER = 32
EXPORTED = [ROOT / "docs" / "methods" / f"{m.name}.md" for m in METHODS if m.kind == "frequencies"]
EXPORTED += [ROOT / "docs" / "shipping.md"]
COMMANDS: Any = get_command(app)


@dataclass(frozen=True)
class Block:
    """A block of code; `runs` is False if all of it is only checked, `skips` names options of such commands."""

    code: str
    runs: bool
    skips: tuple[str, ...]


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield the blocks of a page; not those that `.ci/run` runs, after `<!-- command: NAME -->`."""
    text = page.read_text(encoding="utf-8")
    spans = [match.span() for match in GENERATED.finditer(text)]
    for match in BLOCK.finditer(text):
        if match["language"] == language and match["marker"] != "command":
            generated = any(start < match.start() < end for start, end in spans)
            skips = tuple((match["options"] or "").split(", ")) if match["options"] else ()
            yield Block(
                match["code"], not generated and (not match["marker"] or bool(skips)), skips
            )


def pages_with(language: str) -> list[Any]:
    """The pages with such blocks, README.md always and the others with the slow tests."""
    return [
        pytest.param(page, id=page.name, marks=() if page.name == "README.md" else pytest.mark.slow)
        for page in PAGES
        if any(blocks(page, language))
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the pages name: models, texts and runs."""
    place = tmp_path_factory.mktemp("pages")
    model = tiny_checkpoint(place / "MODEL", num_hidden_layers=4, max_position_embeddings=128)
    shutil.copytree(model, place / "meta-llama/Llama-2-7b-hf")
    shutil.copytree(model, place / "DIR")
    sizes: dict[str, Any] = {"vocab_size": 99, "intermediate_size": 32, "num_hidden_layers": 2}
    learned = RobertaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=66, **sizes
    )
    RobertaForMaskedLM(learned).save_pretrained(place / "FacebookAI/roberta-base")
    sines = XGLMConfig(
        d_model=32, attention_heads=2, max_position_embeddings=64, num_layers=2, ffn_dim=32
    )
    XGLMForCausalLM(sines).save_pretrained(place / "facebook/xglm-564M")
    shutil.copytree(ROOT / "docs/data/demo", place / "runs/demo")
    names = [
        "book.txt",
        "huge.txt",
        *(f"{d}/{i}.txt" for d in ("books", "essays") for i in range(6)),
    ]
    for seed, name in enumerate(names):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(prose(4000, seed))
    with gzip.open(place / "notes.txt.gz", "wt") as file:
        file.write(prose(4000, len(names)))
    return place


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a copy of `prepared`."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Smaller(ast.NodeTransformer):
    """Divides every length in a program: multiples of 512."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if type(node.value) is int and node.value and node.value % 512 == 0:
            return ast.copy_location(ast.Constant(node.value // SMALLER), node)
        return node


@pytest.mark.parametrize("page", pages_with("python"))
@pytest.mark.filterwarnings("ignore:.*starts untrained", "ignore:Plain transformers cannot")
def test_the_python_of_a_page_runs(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        tree = ast.fix_missing_locations(Smaller().visit(ast.parse(block.code)))
        if block.runs:
            exec(compile(tree, page.name, "exec"), names)
        else:
            check_names(tree)


def check_names(tree: ast.Module) -> None:
    """Check that the names of hf_posenc in a program exist, and take the keywords that they are called with."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_posenc"):
            module = importlib.import_module(node.module or "")
            known |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            keywords = {keyword.arg or "": None for keyword in node.keywords}
            inspect.signature(known[node.func.id]).bind(*node.args, **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash"))
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for block in blocks(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", block.code):
            (folder / named[1]).write_text(block.code)
    for block in blocks(page, "bash"):
        for line in block.code.replace("\\\n", "").splitlines():
            words = shlex.split(LAUNCHER.sub("", line), comments=True)
            if not words:
                continue
            if words[0] == "scripts/perplexity.py":
                words[:1] = ["hf-posenc", "perplexity"]
            runs = block.runs and not {*block.skips} & {*words}
            if words[0] == "hf-posenc":
                run_command(words[1:], runs)
            else:
                assert not runs, f"{line}: say why it is not run"
                check_command(line, words)


def run_command(words: list[str], runs: bool) -> None:
    """Run a command, or parse its options alone."""
    command = COMMANDS.commands[words[0]]
    if not runs:
        command.make_context(words[0], words[1:])
        return
    if "MODEL" in words:  # else the embedded model, with its own lengths
        words = [
            re.sub(r"\b(\d+)k\b", lambda k: str(int(k[1]) * 1024 // SMALLER), w) for w in words
        ]
    words = [name for word in words for name in (sorted(map(str, Path().glob(word))) or [word])]
    if any("--dry-run" in option.opts for option in command.params):
        words.append("--dry-run")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"hf-posenc {shlex.join(words)}\n{result.output}"


def check_command(line: str, words: list[str]) -> None:
    """Check the options of a script, and that the files exist which other tools are given."""
    from hf_posenc.training.arguments import parse_arguments

    for path in re.findall(r"\b(?:scripts|tests)[./]\S+", line):
        path = path if "/" in path else f"{path.replace('.', '/')}.py"
        assert (ROOT / path).exists(), line
    if words[0] == "scripts/finetune.py":
        given = [str(ROOT / word) if word.startswith("scripts/") else word for word in words[1:]]
        parse_arguments(ROOT / "scripts/recipes/embedded.yaml", [*given, "--use_cpu"])


@pytest.mark.parametrize(
    "page",
    [
        # These need an export of every frequency method to every engine.
        pytest.param(page, id=page.name, marks=pytest.mark.slow if page in EXPORTED else ())
        for page in make_readme.PAGES
    ],
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == make_readme.filled(page)


def test_a_page_takes_what_was_measured_on_the_real_model_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_pages, "REAL_MODEL", tmp_path)
    assert method_pages.measured(ReRoPE).endswith("not measured on it.")
    benchmarks = ROOT / "docs/data/benchmarks"
    passkeys = json.loads((benchmarks / "bench.json").read_text(encoding="utf-8"))["retrieval"]
    (tmp_path / "passkey.json").write_text(json.dumps(passkeys), encoding="utf-8")
    shutil.copy(benchmarks / "methods.json", tmp_path / "tail-1k.json")
    line = method_pages.measured(ReRoPE).splitlines()[-1]
    assert re.search(
        r": `rerope` \d+\.\d+ \(.* times truncation's, .*\) at 1,024 tokens, 0 of 10 passkeys at 2,048",
        line,
    )


def test_links_of_the_site_keep_their_titles() -> None:
    text = '[a](docs/x.md "A") [b](LICENSE "B")'
    assert links.from_root(text) == '[a](x.md "A") [b](../LICENSE "B")'
    shown = links.for_site(
        '[a](../a.py "A") [b](../CONTRIBUTING.md "B")', "x.md", {"contributing.md": ""}, "https://h"
    )
    assert shown == '[a](https://h/blob/main/a.py "A") [b](contributing.md "B")'


def test_has_at_most_200_lines_and_code_in_the_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("```python") < 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_code_is_overlooked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^[ >]*```([a-z]+)", text, re.MULTILINE)
    assert fences == [match["language"] for match in BLOCK.finditer(text)]
    assert set(fences) <= {"python", "bash", "yaml", "toml", "text"}
    for block in blocks(page, "yaml"):
        yaml.safe_load(block.code)
    for block in blocks(page, "toml"):
        pytest.importorskip("tomllib").loads(block.code)  # of Python 3.11


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
