"""The documentation site: built strictly, complete, and checked in a browser where there is one.

The page of `hf-posenc report` passes the same checks. The tests in a browser are skipped without Chromium (`CHROMIUM`
names another path). With `SCREENSHOTS=DIR` they keep pictures of the whole pages in that folder.
"""

from __future__ import annotations

import ast
import functools
import http.server
import importlib
import logging
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.page import collect, render
from hf_posenc.methods import METHODS
from scripts.results import TRANSCRIBED, read
from scripts.site import hooks, links, mathml, navigation, notebook, reference

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODULES = {
    "hf_posenc": "patching",
    "hf_posenc.methods": "methods",
    "hf_posenc.evaluation": "evaluation",
    "hf_posenc.training": "training",
    "hf_posenc.evaluation.recommend": "evaluation",
    "hf_posenc.engines": "more",
    "hf_posenc.embedded": "more",
}
"""The page of each public module."""
PAGES = (
    *("", "methods/", "methods/yarn/", "choosing/", "evaluation/", "architectures/"),
    "concepts/scale/",
    *("reference/patching/", "reference/cli/", "reference/published/"),
)
REPORT = "report.html"
REPORTED = ("demo", "benchmarks/bench.json", "benchmarks/sweep.json", "real_model/passkey.json")
"""The committed results in the report: perplexity, a benchmark, a sweep and retrieval."""
SIZES = {"desk": (1360, 900), "phone": (390, 844)}
CONTRAST = 4.5  # WCAG AA
QUESTIONS = {
    "why did yarn do nothing": "why-did-yarn-do-nothing",
    "original length": "which-number-is-l-the-original-length",
    "serve a patched model with vllm": "how-do-i-serve-a-patched-model",
    "lora and scale": "does-a-lora-carry-the-scale",
    "which method from 4k to 32k without training": "which-method-takes-a-model-from-4k-to-32k-without-training",
    "measure perplexity of my model on my text": "how-do-i-measure-the-perplexity-of-my-own-model-on-my-own-text",
    "does it work with Qwen3": "does-it-work-with-qwen3-gemma-mamba-bert-or-t5",
    "do I need a gpu": "do-i-need-a-gpu",
    "google colab notebook": "does-it-run-on-windows-a-mac-or-google-colab",
    "license": "what-is-the-license",
    "needle in a haystack": "what-is-a-passkey-a-needle-in-a-haystack-tail-perplexity",
    "ValueError model already patched": "this-model-is-already-patched-how-do-i-patch-it-again",
    "bitsandbytes 4bit": "can-i-patch-a-quantized-model-bitsandbytes-gptq-awq",
    "can I use gguf files": "can-i-use-a-gguf-file-ollama-or-lm-studio",
    "error: No document can be used": "no-document-can-be-used",
    "GPT2LMHeadModel has no rotary embedding": "has-no-rotary-embedding",
    "push to hub": "how-do-i-push-a-patched-model-to-the-hub",
    "gpt2 longer than 1024": "how-do-gpt-2-and-bert-read-texts-longer-than-1024-or-512-tokens",
    "qwen3 yarn short prompts worse": "what-does-static-yarn-cost-on-short-texts",
    "phi-3 longrope cache": "phi-3-phi-4-mini-minicpm-the-checkpoints-own-lists",
    "rope_scaling json": "what-do-i-write-into-rope_scaling-or-rope_parameters-of-configjson",
    "out of memory": "out-of-memory-how-much-does-128k-take",
    "resume": "a-run-was-killed-how-do-i-resume-it",
    "colab": "does-it-run-on-windows-a-mac-or-google-colab",
}
"""Questions of newcomers, and the section of the first or second page that the search finds."""


# Text between Markdown and the site.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](evaluation.md#x)", "[a](evaluation.md#x)"),
        ("[evaluation.md](evaluation.md#x)", "[Perplexity](evaluation.md#x)"),
        ('[a](../a.py "A")', '[a](https://host/o/r/blob/main/a.py "A")'),
        ('[b](../CONTRIBUTING.md "B")', '[b](contributing.md "B")'),
        ("[a](../scripts/perplexity.py)", "[a](https://host/o/r/blob/main/scripts/perplexity.py)"),
        ("[a](data/finetuned/)", "[a](https://host/o/r/blob/main/docs/data/finetuned)"),
        ("[a](../CONTRIBUTING.md#add-a-method)", "[a](contributing.md#add-a-method)"),
        ("[`a`](../b.py), `[c](d)`", "[`a`](https://host/o/r/blob/main/b.py), `[c](d)`"),
        ("```text\n[c](../d.py)\n<!-- e -->\n```", "```text\n[c](../d.py)\n<!-- e -->\n```"),
        ("a\n\n<!-- command: demo -->\n```bash\nx\n```", "a\n\n\n```bash\nx\n```"),
        ("a <!-- end --> b", "a  b"),
    ],
)
def test_links_and_comments_for_the_site(text: str, expected: str) -> None:
    titles = {"evaluation.md": "Perplexity", "contributing.md": "Contributing"}
    assert links.for_site(text, "choosing.md", titles, "https://host/o/r/") == expected


def test_links_of_a_copied_page_and_without_an_address_of_the_repository() -> None:
    text = '[a](docs/methods.md#x) [b](LICENSE "B") [c](#d) [e](https://f)'
    assert links.from_root(text) == '[a](methods.md#x) [b](../LICENSE "B") [c](#d) [e](https://f)'
    text = "[recipe](../../scripts/a.yaml) [`scripts/a.yaml`](../../scripts/a.yaml) [a.yaml](../../scripts/a.yaml)"
    shown = "recipe (`scripts/a.yaml`) `scripts/a.yaml` `scripts/a.yaml`"
    assert links.for_site(text, "methods/yarn.md", {}, "") == shown


def formula(source: str, kind: str = "span") -> str:
    """The HTML of a formula, inline or (`div`) displayed."""
    marks = (r"\(", r"\)") if kind == "span" else (r"\[", r"\]")
    html = f'<{kind} class="arithmatex">{source.join(marks)}</{kind}>'
    return mathml.rendered(html, "page.md").replace('<mspace width="0.167em"/>', " ")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (r"0.1\ln s + 1", "<mn>0.1</mn> <mi>ln</mi> <mi>s</mi><mo>"),  # spaces as TeX sets them
        (r"b\ln(s)", "<mi>b</mi> <mi>ln</mi><mo"),
        (r"\log_b L", "<msub><mi>log</mi><mi>b</mi></msub> <mi>L</mi>"),
        ("a_i &lt; 1", '<math alttext="a_i &lt; 1"'),
        ("a_i &lt; 1", "<msub><mi>a</mi><mi>i</mi></msub>"),
    ],
)
def test_formulas_become_mathml(source: str, part: str) -> None:
    assert part in formula(source)


def test_an_unknown_command_in_a_formula_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        formula(r"\unheardof{x}", "div")
    assert r"page.md: unknown \unheardof" in caplog.text


def test_a_wide_formula_is_cut_at_its_wide_spaces_alone() -> None:
    cases, group = r"\begin{cases} b \qquad c \end{cases}", r"\left\{ d_{e \qquad f} \right\}"
    assert mathml.split(rf"a \qquad {cases} \qquad {group}") == ["a", cases, group]
    html = formula(r"a \qquad b", "div")
    assert re.sub(r"<(/?\w+).*?>", r"<\1>", html).count("<math>") == 2
    assert html.startswith('<div class="formula"><math ')


def test_short_code_and_options_stay_on_one_line_and_pictures_open() -> None:
    kept = f'<pre><code>{"-a " * 20}</code></pre><a href="c"><img alt="" src="c.png"></a>'
    code = "<code>--text FILES</code><code>hf-posenc perplexity --text FILES -o x</code>"
    text = f'{code}{kept}<img src="b.png"><img src="x/headline.png">'
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    assert hooks.on_page_content(text, page) == (
        '<code class="short">--text FILES</code>'
        f"<code>hf-posenc perplexity <span>--text</span> FILES <span>-o</span> x</code>{kept}"
        '<a href="b.png"><img src="b.png"></a>'
        '<a href="x/headline.png"><picture><source media="(max-width: 45em)" srcset="x/headline-narrow.png">'
        '<img src="x/headline.png"></picture></a>'
    )


def test_the_notebook_is_a_page_with_its_outputs() -> None:
    text = notebook.page(DOCS)
    assert text.startswith("# Quickstart")
    assert text.count('src="data:image/png;base64,') == 3
    assert "```text\nTrue\n```" in text


PROGRAM = re.compile(r"^ *```(?:bash|python)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)
FITS = 92


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_code_fits_its_box(page: Path) -> None:
    """At a desktop the box shows about 96 characters, and the end of a longer line is cut off without a sign."""
    text = GENERATED.sub("", page.read_text(encoding="utf-8"))
    lines = [line for code in PROGRAM.findall(text) for line in code.splitlines()]
    assert not [line for line in lines if len(line) > FITS]


def test_the_navigation_has_every_page_once_and_methods_by_kind() -> None:
    nav: Any = navigation.expand(_config()["nav"], DOCS)
    pages = navigation.pages_of(nav)
    assert len(pages) == len({*pages})
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {*pages} == written | {"contributing.md", "changelog.md", "notebook.md"}
    (methods,) = (entry["Methods"] for entry in nav if "Methods" in entry)
    kinds: dict[str, Any] = {}
    for entry in methods:
        kinds |= entry if isinstance(entry, dict) else {}
    assert {"yarn": "methods/yarn.md"} in kinds["Frequencies"]
    assert {"rerope": "methods/rerope.md"} in kinds["Rotary bands"]


def test_the_messages_of_the_page_about_errors_are_in_the_source() -> None:
    """A heading quotes what is constant in a message, with `...` between its parts."""
    headings = re.findall(r"^### .*$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.M)
    quoted = [re.match(r'### "(.+?)"', heading) for heading in headings]
    assert len(quoted) > 10
    assert all(quoted), headings
    messages: set[str] = set()
    for file in (ROOT / "hf_posenc").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        messages |= {_constant_parts(node) for node in nodes if node not in docstrings}
    for match in filter(None, quoted):
        parts = re.compile(".*".join(map(re.escape, match[1].split("..."))), re.S)
        assert any(map(parts.search, messages)), match[1]


def _constant_parts(node: ast.AST) -> str:
    """Return a string with a NUL for each value in it; of anything else an empty string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_constant_parts(part) or "\0" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def _config() -> dict[str, Any]:
    """The configuration, without the tags that only mkdocs reads."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return config


# Reference pages.


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    page = reference.filled((DOCS / f"reference/{MODULES[module]}.md").read_text())
    documented = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, re.M)}
    assert {*importlib.import_module(module).__all__} <= documented


def test_every_command_recipe_and_table_is_on_its_page() -> None:
    from hf_posenc import available_recipes

    cli = reference.cli()
    assert "## hf-posenc perplexity" in cli
    assert "| `--tail-tokens K` | Tokens that `tail` scores." in cli
    assert re.search(r"\| `--split \w+` \| The dataset's split\. \*Default: `test`\.\* \|", cli)
    recipes, tables = reference.recipes(), reference.published_tables()
    assert all(f"`{name}`" in recipes for name in available_recipes())
    assert tables.count("## `") == len(read(TRANSCRIBED)["tables"]) > 40
    with pytest.raises(PosencError, match="unheard_of"):
        reference.filled("<!-- site: unheard_of -->")


# The built site.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, where a warning is an error; a report lies beside its pages."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    report = render(collect([DOCS / "data" / name for name in REPORTED]))
    (folder / REPORT).write_text(report, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_site_is_complete(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]
    objects = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    for module in MODULES:
        names = importlib.import_module(module).__all__
        assert {f"{module}.{name}" for name in names} <= objects | {f"{module}.METHODS"}, module
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert "<!-- site:" not in html, page
        assert 'class="arithmatex"' not in html, page
        # Python-Markdown wants an empty line before a list, and four spaces before a list in a list; GitHub does not.
        assert not re.search(r"<p>(?:(?!</p>).)*\n(?:[-*]|\d+\.) ", html, re.S), page
    for source in DOCS.rglob("*.md"):
        text = links.FENCED.sub("", source.read_text(encoding="utf-8"))
        assert not re.search("(?m)^ {1,3}[-*] ", text), source


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH: install it, or name one in CHROMIUM")
    playwright: Any = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


STRUCTURE = """() => {
  const root = document.querySelector('article') || document.body;
  const all = selector => [...root.querySelectorAll(selector)];
  const levels = all('h1, h2, h3, h4, h5, h6').map(h => +h.tagName[1]);
  const named = '[role="img"][aria-label]:not([aria-label=""]), a, button, label, nav, .legend';
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    titles: document.querySelectorAll('h1').length,
    skipped: levels.filter((level, index) => index && level > levels[index - 1] + 1),
    unnamed: [...document.images].filter(image => !image.alt).map(image => image.src),
    broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
    undescribed: all('svg').filter(svg => !svg.closest(named)).map(svg => svg.outerHTML.slice(0, 80)),
    headless: all('table').filter(table => !table.querySelector('th')).map(table => table.textContent.slice(0, 80)),
    collapsed: all('pre, pre *').filter(part => !getComputedStyle(part).whiteSpace.startsWith('pre'))
      .map(part => part.parentElement.textContent.slice(0, 80)),
    overlapping: all('table:not([class]) tr > :first-child').filter(cell => cell.scrollWidth > cell.clientWidth + 2)
      .map(cell => cell.textContent),
    language: document.documentElement.lang,
  };
}"""

COLOURS = """() => {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((value, index) => top[index] * top[3] + value * (1 - top[3]));
  const light = colour => colour.slice(0, 3).map(value => value / 255)
    .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4)
    .reduce((sum, value, index) => sum + value * [.2126, .7152, .0722][index], 0);
  const ground = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = {};
  const text = ':is(p, li, a, code, th, td, h1, h2, h3, h4, span, data, summary, figcaption, text)';
  for (const element of document.querySelectorAll(
    `article ${text}, body:not(:has(article)) ${text}, `
    + '.md-header__topic, .md-tabs__link, .md-nav__link, .md-footer span'
  )) {
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    if (element.closest('.headerlink, .md-clipboard, .md-code__nav')) continue;
    const back = ground(element), style = getComputedStyle(element);
    const colour = element.matches('text') ? style.fill : style.color, ink = rgba(colour);
    // White numbers stand on the dark cells of a heat map, which are no background of an element.
    if (element.matches('figure text') && colour === 'rgb(255, 255, 255)') continue;
    for (let e = element; e; e = e.parentElement) ink[3] *= +getComputedStyle(e).opacity;
    const [high, low] = [light(over(ink, back)), light(back)].sort((a, b) => b - a);
    const ratio = (high + .05) / (low + .05);
    const name = element.tagName + '.' + element.className + ': ' + element.textContent.trim().slice(0, 20);
    const key = colour + back;
    if (!found[key] || found[key][0] > ratio) found[key] = [ratio, name];
  }
  return Object.values(found);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_a_browser(scheme: str, size: str, browser: Any, address: str) -> None:
    width, height = SIZES[size]
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    own = (address, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(own) else faults.append(r.url))
    page.on("response", lambda r: faults.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    for name in (*PAGES, REPORT):
        page.goto(address + name)  # until its load event: a starved parser looks idle
        page.wait_for_load_state("networkidle")
        _check(page, name)
        if folder := os.environ.get("SCREENSHOTS"):
            stem = name.strip("/").replace("/", "-") or "index"
            page.screenshot(path=Path(folder) / f"{stem}-{scheme}-{size}.png", full_page=True)
    assert not faults
    context.close()


def _check_structure(page: Any, name: str) -> None:
    found = page.evaluate(STRUCTURE)
    numbers = {"language": "en", "overflow": 0, "titles": 1}
    assert found == {key: [] for key in found} | numbers, (name, found)


def _check(page: Any, name: str) -> None:
    _check_structure(page, name)
    colours = page.evaluate(COLOURS)
    assert colours, name
    poor = [each for each in colours if each[0] < CONTRAST]
    assert not poor, (name, poor)


@pytest.mark.slow
def test_every_page_fits_a_phone(browser: Any, address: str, site: Path) -> None:
    width, height = SIZES["phone"]
    page = browser.new_page(viewport={"width": width, "height": height})
    names = sorted(file.parent.relative_to(site).as_posix() for file in site.rglob("index.html"))
    assert len(names) > len(METHODS)
    for name in names:
        page.goto(f"{address}{name}/")
        _check_structure(page, name)
    page.close()


@pytest.mark.slow
def test_the_report_in_print(browser: Any, address: str) -> None:
    a4 = {"width": 688, "height": 1000}
    context = browser.new_context(color_scheme="dark", viewport=a4)
    page = context.new_page()
    page.goto(address + REPORT)
    page.emulate_media(media="print")
    _check(page, REPORT)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / "report-print.png", full_page=True)
    context.close()


FOCUS = """() => {
  const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
  const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
  const shown = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return outlined && shown ? '' : element.outerHTML.slice(0, 120);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["methods/", REPORT])
def test_the_keyboard(name: str, browser: Any, address: str) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto(address + name)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip, .skip')")
    assert not page.evaluate(FOCUS)
    page.keyboard.press("Enter")
    for _ in range(20):  # goes on in the text, past the navigation
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('.md-content, #main') !== null")
        assert not page.evaluate(FOCUS)
    page.close()


WORDS = {
    "self extend": ("methods/self_extend/", "extend/"),
    "vllm": ("vllm/", "serving/"),
    "ntk by parts": ("methods/ntk_by_parts/",),
    "128k on 80GB": ("#out-of-memory-how-much-does-128k-take", "#one-gpu-of-24-or-80-gb"),
    "dynamic ntk batch": ("methods/dynamic_ntk/",),
    "which method": ("choosing/",),
    "lm_eval": ("lm_eval/",),
}
"""Words that people type, and the pages or sections of which one is the first or second that the search finds."""


@pytest.mark.slow
def test_the_search(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address + "methods/")
    page.wait_for_function(  # the worker has the index, and the theme listens to its keys
        "document.querySelector('.md-search-result__meta').textContent.includes('Type to start')"
    )
    page.keyboard.press("f")  # the theme's key for the search
    asked = {question: (f"#{section}",) for question, section in QUESTIONS.items()}
    for question, places in {**asked, **WORDS}.items():
        page.wait_for_function("document.activeElement.matches('.md-search__input')")
        page.keyboard.press("Control+A")
        page.keyboard.type(question)
        page.wait_for_function(  # results follow every key
            """places => [...document.querySelectorAll('.md-search-result__item')].slice(0, 2)
            .some(item => [...item.querySelectorAll('a')].some(
                link => places.some(place => (link.pathname + link.hash).endsWith(place))))""",
            arg=places,
        )
    page.close()
