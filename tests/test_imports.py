"""Who may import whom (read from the source by `ast`), and what importing the package must not do."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import printed

ROOT = Path(__file__).parents[1]

# From the bottom up; a unit imports from lower layers and from itself, never from its own layer's others or from above.
LAYERS = (
    ("errors",),
    ("files", "lengths"),
    ("rope", "embedded"),
    ("methods",),
    ("attention", "adapters"),
    ("catalog", "recipes"),
    ("gguf_file",),
    ("model",),
    ("seams",),
    ("patch",),
    ("diagnosis",),
    ("saving",),
    ("engines", "verification"),
    ("evaluation",),
    ("training",),
    ("cli",),
    ("serve",),
)
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, inner ones too; the expressions in them, which are most nodes, import nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """The dotted names that a file imports, wherever in it: at the top, in a function, under TYPE_CHECKING."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            # `from hf_posenc import errors` names a unit; `from hf_posenc import patch_model` the package itself
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _unit(path: Path) -> str:
    return path.relative_to(ROOT / "hf_posenc").parts[0].removesuffix(".py")


PACKAGE = sorted((ROOT / "hf_posenc").rglob("*.py"))
ADAPTERS = sorted((ROOT / "patches").rglob("*.py"))


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in PACKAGE if _unit(p) != "__init__"], ids=_label)
def test_imports_go_one_way(path: Path) -> None:
    unit = _unit(path)
    assert unit in HEIGHT, f"{unit} has no place in the layers of this test (and of the design)"
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if package != "hf_posenc" or other == unit:
            continue
        if other not in HEIGHT and unit == "cli":
            continue  # the command line uses the public names, as any program does
        assert other in HEIGHT, f"{name}: import from the module that defines it, not the package"
        assert HEIGHT[other] < HEIGHT[unit], f"{unit} stands below {other} and may not import it"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count: what is only deferred is a cycle all the same."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    arrows = {
        name: {
            imported if imported in files else imported.rpartition(".")[0]
            for imported in imports_of(path)
        }
        & files.keys() - {name}
        for name, path in files.items()
    }
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "path", [path for path in PACKAGE if _unit(path) in ("methods", "rope", "errors")], ids=_label
)
def test_the_mathematics_does_not_know_transformers(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] == "transformers"]


@pytest.mark.parametrize("path", ADAPTERS, ids=_label)
def test_adapters_import_only_what_describes_an_architecture(path: Path) -> None:
    units = {name.split(".")[1] for name in imports_of(path) if name.startswith("hf_posenc.")}
    assert units <= {"adapters", "errors"}
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"math", "numpy", "torch"}, "patches/ contains no mathematics"


def test_pages_are_made_without_matplotlib() -> None:
    reached, files = set[Path](), [ROOT / "scripts" / "make_readme.py"]
    while files:
        reached.add(path := files.pop())
        names = imports_of(path)
        assert not [name for name in names if name.startswith("matplotlib")], path
        own = {
            ROOT / "scripts" / f"{n.split('.')[1]}.py" for n in names if n.startswith("scripts.")
        }
        files += own - reached
    assert {"results.py", "concept_pages.py", "method_pages.py"} < {path.name for path in reached}


def test_nobody_imports_the_adapters_by_name() -> None:
    for path in [*PACKAGE, *ADAPTERS, *sorted((ROOT / "scripts").glob("*.py"))]:
        for name in imports_of(path):
            assert not f"{name}.".startswith(("patches.", "hf_posenc.patches.")), (path, name)


# What importing a Llama of transformers already costs is not ours; the rest of the process must stay as it was.
_PROBE = """
import json, logging, random, sys, warnings
import torch
import transformers.models.llama.modeling_llama as llama
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

def state():
    return [
        sorted(ROPE_INIT_FUNCTIONS),
        sorted(AttentionInterface()),
        sorted(AttentionMaskInterface()),
        {name: id(value) for name, value in vars(llama).items()},
        {name: id(value) for name, value in vars(llama.LlamaAttention).items()},
        {name: id(value) for name, value in vars(llama.LlamaRotaryEmbedding).items()},
        {name: id(value) for name, value in vars(transformers.PreTrainedModel).items()},
        str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_rng_state().sum().item(), hash(random.getstate()),
        len(warnings.filters), logging.getLogger().level, len(logging.getLogger().handlers),
    ]

import transformers
transformers.PreTrainedModel
before, loaded = state(), set(sys.modules)
import hf_posenc
for name in hf_posenc.__all__:
    getattr(hf_posenc, name)
unchanged = [a == b for a, b in zip(before, state(), strict=True)]
new = sorted(set(sys.modules) - loaded)
import hf_posenc.evaluation as evaluation
late = sorted(set(sys.modules) - loaded)
found = {name: getattr(evaluation, name).__name__ for name in evaluation.__all__}
print(json.dumps([unchanged, new, late, found, dir(evaluation)]))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    found = json.loads(printed(_PROBE, ROOT).splitlines()[-1])
    return dict(zip(("unchanged", "new", "late", "found", "listed"), found, strict=True))


@pytest.mark.slow
def test_importing_the_package_changes_nothing_anywhere(probe: dict[str, Any]) -> None:
    assert all(probe["unchanged"]), probe["unchanged"]


@pytest.mark.slow
def test_importing_the_package_loads_no_optional_library(probe: dict[str, Any]) -> None:
    roots = {str(name).split(".")[0] for name in probe["new"]}
    heavy = {"datasets", "matplotlib", "pandas", "peft", "pyarrow", "rich", "typer", "accelerate"}
    assert not roots & heavy
    ours = {str(name).split(".")[1] for name in probe["new"] if str(name).startswith("hf_posenc.")}
    assert not ours & {"cli", "evaluation", "training", "embedded"}, "these load on first use"


@pytest.mark.slow
def test_names_of_the_package_are_loaded_on_first_use() -> None:
    probe = (
        "import json, pickle, sys, hf_posenc as h; before = sorted(sys.modules); listed = dir(h)\n"
        "from hf_posenc import *\n"
        "assert h.methods.YaRN is get_method('yarn') and h.patch_model is patch_model\n"
        "assert pickle.loads(pickle.dumps(Method)) is Method\n"
        "print(json.dumps([before, listed, h.__all__, [n in globals() for n in h.__all__]]))"
    )
    before, listed, names, found = json.loads(printed(probe, ROOT).splitlines()[-1])
    assert [name for name in before if name.startswith("hf_posenc")] == ["hf_posenc"]
    assert not {"torch", "numpy", "transformers"} & set(before)
    assert set(names) <= set(listed)
    assert all(found)


def test_the_names_are_those_that_type_checkers_see() -> None:
    import hf_posenc

    tree = ast.parse((ROOT / "hf_posenc" / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_posenc.")
        for alias in node.names
    }
    homes = {name: f"hf_posenc.{module}" for name, module in hf_posenc._HOMES.items()}
    assert seen == homes


@pytest.mark.slow
def test_what_programs_call_is_loaded_on_first_use(probe: dict[str, Any]) -> None:
    assert "hf_posenc.evaluation" in probe["late"]
    assert not [name for name in probe["late"] if name.startswith("hf_posenc.evaluation.")]
    assert probe["found"] == {name: name for name in probe["found"]}
    assert set(probe["found"]) <= set(probe["listed"])
