"""Ways to run a model, kinds of patches, and the table of both: whatever runs unpatched runs patched, or is refused.

A new way to run is a row of `WAYS`, and a new kind of patch a column of `KINDS`. `docs/running.md` is `page()`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_posenc import patch_model
from hf_posenc.evaluation.grid import markdown_table
from tests.support import zoo
from tests.support.families import build_text_model
from tests.support.zoo import CACHE

# Kinds of patches


@dataclass(frozen=True)
class Kind:
    """A patch, the type of the model that gets it, and the patches that it stands for."""

    model: str
    method: str
    options: Mapping[str, Any]
    others: str
    # In tokens: more than the fused paths of attention need, or as many as a table has.
    length: int = 72

    def build(self) -> Any:
        """Return an unpatched model without dropout."""
        known = self.model in zoo.decoder_types()
        model: Any = zoo.build(self.model) if known else build_text_model(self.model)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(vars(part).get("dropout"), float):  # T5's attention has a number
                vars(part)["dropout"] = 0.0
        return model

    def patch(self, model: Any) -> Any:
        """Patch a model; parameters to train get the same values each time."""
        return trained(patch_model(model, self.method, **self.options))

    @property
    def words(self) -> str:
        given = (f"{key}={json.dumps(value)}" for key, value in self.options.items())
        return ", ".join((json.dumps(self.method), *given))

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of its runs; steps with a cache are for decoders alone."""
        steps = () if self.model in ("bert", "t5") else ("steps",)
        return ("prefill", *steps, "training")


def trained(model: Any) -> Any:
    """Give a method's own parameters values that a training could."""
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        if ".posenc." in name:
            value.data.copy_(0.3 + 0.4 * torch.rand(value.shape, generator=generator))
    return model


_SHORT = {"original_max_position_embeddings": 32}
_REQUEST, _SEQUENCE = ({"update": update, **_SHORT} for update in ("request", "sequence"))
KINDS: dict[str, Kind] = {
    "static frequencies": Kind(
        "llama", "yarn", {"scale": 4}, "methods that change frequencies once: `pi`, `ntk`, `llama3`, ..."),
    "dynamic by row": Kind("llama", "dynamic_ntk", _SHORT, "`dynamic_*` as they come"),
    "dynamic by request": Kind("llama", "dynamic_ntk", _REQUEST, '`dynamic_*` with `update="request"`'),
    "dynamic by sequence": Kind("llama", "dynamic_ntk", _SEQUENCE, '`dynamic_*` with `update="sequence"`'),
    "bands": Kind(
        "llama", "rerope", {"window": 16}, "two or more rotations by distance: `self_extend`, `leaky_rerope`, ..."),
    "chunks": Kind("llama", "dual_chunk", _SHORT, "rotations by chunk"),
    "bias": Kind("llama", "alibi", {}, "biases by distance in place of the rotation: `sandwich`, ..."),
    "trained bias": Kind("llama", "kerple_log", {}, "methods with parameters: `t5`, `fire`, `rope_bias`, ..."),
    "longer table": Kind(
        "gpt2", "interpolate", {"scale": 2},
        "tables of positions that are made longer: `stretch`, `hierarchical`, ...", 60),
    "bias for a table": Kind("gpt2", "alibi", {}, "biases in decoders with a table of positions", 60),
    "bias for an encoder": Kind("bert", "alibi", {}, "biases in encoders", 60),
    "scaled T5 bias": Kind("t5", "t5", {"scale": 2}, "the model's own biases by distance, for longer texts", 60),
    "scaled ALiBi": Kind("bloom", "alibi", {"scale": 2}, "the model's own ALiBi, for longer texts", 60),
}  # fmt: skip

# Runs


def texts(model: Any, kind: Kind, seed: int = 3) -> dict[str, Any]:
    """Return two texts as arguments of a forward without a cache."""
    ids = zoo.tokens(kind.length, batch=2, seed=seed)
    config = getattr(model, "module", model).config
    given: dict[str, Any] = {"input_ids": ids}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = ids.flip(1)
    return given if config.model_type == "bert" else {**given, "use_cache": False}


def prefill(model: Any, kind: Kind) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**texts(model, kind)).logits
    return logits.double()


def steps(model: Any, kind: Kind, cache: Any = None) -> Tensor:
    """Logits of the texts, whose last tokens follow a cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids, parts = texts(model, kind)["input_ids"], []
    with torch.no_grad():
        for piece in ids.split([kind.length - 7, 1, 1, 4, 1], 1):
            parts.append(model(input_ids=piece, **{CACHE: cache}).logits.double())
    return torch.cat(parts, 1)


def padded(model: Any, kind: Kind) -> Tensor:
    """Logits of a whole text, beside a shorter one with padding behind it."""
    given, last = texts(model, kind), kind.length - 9
    mask = torch.ones_like(given["input_ids"])
    mask[1, last:] = 0
    masks = {name.replace("input_ids", "attention_mask"): mask for name in given if "ids" in name}
    with torch.no_grad():
        logits = model(**given, **masks).logits.double()
    return torch.cat((logits[0], logits[1, :last]))


def unpadded(model: Any, kind: Kind) -> Tensor:
    given, last = texts(model, kind), kind.length - 9
    logits = []
    for row, end in enumerate((None, last)):
        one = {name: ids[row : row + 1, :end] for name, ids in given.items() if "ids" in name}
        with torch.no_grad():
            logits.append(model(**one).logits[0].double())
    return torch.cat(logits)


def batch_generated(model: Any, kind: Kind) -> Tensor:
    """The greedy continuation of two texts, of which the first one has padding before it."""
    ids = texts(model, kind)["input_ids"][:, :-12]
    ids[0, :9], mask = 0, torch.ones_like(ids)
    mask[0, :9] = 0
    return _greedy(model, ids, attention_mask=mask)[:, -12:]


def each_generated(model: Any, kind: Kind) -> Tensor:
    ids = texts(model, kind)["input_ids"][:, :-12]
    return torch.cat([_greedy(model, each)[:, -12:] for each in (ids[:1, 9:], ids[1:])])


def loss_of(model: Any, kind: Kind) -> Tensor:
    loss: Tensor = model(**texts(model, kind)).logits.float().square().mean()
    return loss


def gradients(model: Any) -> Tensor:
    """All gradients of float parameters, in the order of their names."""
    named = sorted(model.named_parameters(), key=lambda pair: pair[0].replace("_orig_mod.", ""))
    found = [torch.zeros_like(each) if each.grad is None else each.grad for _, each in named]
    whole = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in found)
    return torch.cat([each.double().flatten() for each in whole])


def training(model: Any, kind: Kind) -> Tensor:
    model.train().zero_grad()
    loss_of(model, kind).backward()
    return gradients(model)


def generated(model: Any, kind: Kind, **options: Any) -> Tensor:
    """The greedy continuation of one text, which has its first half twice, so that there are drafts from the prompt."""
    half = texts(model, kind)["input_ids"][:1, : kind.length // 2 - 10]
    return _greedy(model, half.tile(1, 2), **options)


def _greedy(model: Any, ids: Tensor, **options: Any) -> Tensor:
    given = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 1}
    with torch.no_grad():
        found: Tensor = model.generate(ids, **{**given, **options})
    return found.double()


Run = Callable[[Any, Kind], Tensor]
PLAIN: dict[str, Run] = {"prefill": prefill, "steps": steps, "training": training}

# Ways


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        sentence: What a reader of the page knows it by.
        before, after: What is done to a model before it is patched, and afterwards; a folder is at hand.
        within: The context of a run.
        runs: The runs of this way, each with the plain one that gives the same; `None`: all plain ones.
    """

    sentence: str
    before: Callable[[Any, Path], Any] = lambda model, folder: model
    after: Callable[[Any, Path], Any] = lambda model, folder: model
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    runs: Mapping[str, tuple[Run, Run]] | None = None

    def pairs(self, kind: Kind) -> dict[str, tuple[Run, Run]]:
        """Return the runs of a kind in this way, and the plain ones."""
        runs = self.runs or {name: (run, run) for name, run in PLAIN.items()}
        return {name: pair for name, pair in runs.items() if name in kind.runs}


def cast(dtype: torch.dtype) -> Way:
    name = str(dtype).removeprefix("torch.")
    return Way(f"weights in {name}", after=lambda model, folder: model.to(dtype))


def autocast(dtype: torch.dtype) -> Way:
    name = str(dtype).removeprefix("torch.")
    region = functools.partial(torch.autocast, "cpu", dtype=dtype)
    return Way(f"float32 weights under `torch.autocast` in {name}", within=region)


def scaled_training(model: Any, kind: Kind) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.train().zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model, kind)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions in threads that take turns every ten microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]
    finally:
        sys.setswitchinterval(interval)


def beside_another(run: Run) -> Run:
    """A run in one thread, while another one runs shorter texts."""

    def both(model: Any, kind: Kind) -> Tensor:
        shorter = dataclasses.replace(kind, length=kind.length - 20)
        want = run(model, shorter)

        def thrice(kind: Kind) -> list[Tensor]:
            return [run(model, kind) for _ in range(3)]

        found, others = at_once([functools.partial(thrice, each) for each in (kind, shorter)])
        for each in others:
            torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
        return torch.stack(found).mean(0)

    return both


def recomputed(reentrant: bool) -> Way:
    def enabled(model: Any, folder: Path) -> Any:
        if reentrant:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    def run(model: Any, kind: Kind) -> Tensor:
        model.train().zero_grad()
        loss = loss_of(model, kind)
        with torch.no_grad():
            model(**texts(model, dataclasses.replace(kind, length=20), seed=9))
        loss.backward()
        return gradients(model)

    sentence = (
        f"gradient checkpointing, `use_reentrant={reentrant}`, another forward before the backward"
    )
    return Way(sentence, after=enabled, runs={"training": (run, training)})


def exported(model: Any, kind: Kind) -> Tensor:
    """Run a program that another text of the same shape has made."""
    program = torch.export.export(model.eval(), (), texts(model, kind, seed=9))
    logits: Tensor = program.module()(**texts(model, kind)).logits
    return logits.detach().double()


def functional(model: Any, kind: Kind) -> Tensor:
    """Run with the weights of the model, whose own are zero meanwhile."""
    with torch.no_grad():
        values = {name: value.detach().clone() for name, value in model.named_parameters()}
        _zero(model.parameters())
        logits: Tensor = torch.func.functional_call(model, values, (), texts(model, kind)).logits
    return logits.double()


def functional_gradients(model: Any, kind: Kind) -> Tensor:
    given, values = texts(model, kind), dict(model.train().named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        logits: Tensor = torch.func.functional_call(model, values, (), given).logits
        return logits.float().square().mean()

    found = torch.func.grad(loss)({name: value.detach() for name, value in values.items()})
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def _zero(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.data.zero_()


def copied(model: Any, folder: Path) -> Any:
    found = copy.deepcopy(model)
    _zero((*model.parameters(), *model.buffers()))
    return found


_graphs: list[Any] = []


def traced(graph: Any, inputs: Any) -> Any:
    """Note a graph, and run it as it was traced: a backend of `torch.compile`."""
    _graphs.append(graph)
    return graph.forward


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Forget what was compiled before, and check that a graph is traced."""
    torch.compiler.reset()
    _graphs.clear()
    yield
    assert _graphs


def in_static_cache(model: Any, kind: Kind) -> Tensor:
    return steps(model, kind, StaticCache(model.config, max_cache_len=kind.length))


def generating(**options: Any) -> dict[str, tuple[Run, Run]]:
    return {"steps": (lambda model, kind: generated(model, kind, **options), generated)}


def assisted(model: Any, kind: Kind) -> Tensor:
    return generated(model, kind, assistant_model=kind.build())


def hooked(model: Any, folder: Path) -> Any:
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        module.register_forward_hook(lambda module, args, kwargs, output: None, with_kwargs=True)
    return model


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def emptied(model: Any, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "weights.pt")
    with accelerate.init_empty_weights(include_buffers=False):
        return type(model)(copy.deepcopy(model.config)).eval()


def filled(model: Any, folder: Path) -> Any:
    model.load_state_dict(torch.load(folder / "weights.pt"), strict=False, assign=True)
    model.tie_weights()
    return model


def offloaded(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, torch.device("cpu"))


def on_disk(model: Any, folder: Path) -> Any:
    accelerate.disk_offload(model, str(folder / "disk"), torch.device("cpu"))
    return model


def replica(model: Any, folder: Path) -> Any:
    """Return what `nn.DataParallel` runs on a second device; the weights of the model itself become zero."""

    def copies(tensors: Any, devices: Any, detach: bool = False) -> Any:
        return [[tensor.detach().clone() for tensor in tensors]]

    with mock.patch("torch.nn.parallel.replicate._broadcast_coalesced_reshape", copies):
        (found,) = nn.parallel.replicate(model, [0], detach=True)
    _zero(model.parameters())
    return found


def sharded(model: Any, folder: Path) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))


INFERENCE: dict[str, tuple[Run, Run]] = {"prefill": (prefill, prefill), "steps": (steps, steps)}
WAYS: dict[str, Way] = {
    "float64": cast(torch.float64),
    "float32": cast(torch.float32),
    "bfloat16": cast(torch.bfloat16),
    "float16": cast(torch.float16),
    "autocast bfloat16": autocast(torch.bfloat16),
    "autocast float16": autocast(torch.float16),
    "gradient scaler": Way(
        "a gradient scaler, under autocast in float16", runs={"training": (scaled_training, training)}),
    "CPU offload": Way("`accelerate.cpu_offload`, then the patch", offloaded, runs=INFERENCE),
    "disk offload": Way("`accelerate.disk_offload`, then the patch", on_disk, runs=INFERENCE),
    "offload after": Way("the patch, then `accelerate.cpu_offload`", after=offloaded, runs=INFERENCE),
    "meta device": Way("patched without weights (`init_empty_weights`), then filled", emptied, filled),
    "threads": Way(
        "two threads at once", runs={name: (beside_another(run), run) for name, (run, _) in INFERENCE.items()}),
    "checkpointing": recomputed(False),
    "reentrant checkpointing": recomputed(True),
    "torch.compile": Way(
        "`torch.compile`, without Inductor", after=lambda model, folder: torch.compile(model, backend=traced),
        within=compiled, runs={"prefill": (prefill, prefill), "training": (training, training)}),
    "torch.export": Way("`torch.export`", runs={"prefill": (exported, prefill)}),
    "functional_call": Way("`torch.func.functional_call`", runs={"prefill": (functional, prefill)}),
    "torch.func.grad": Way("`torch.func.grad`", runs={"training": (functional_gradients, training)}),
    "padding": Way(
        "a padded batch: behind a text, and before one in `generate`",
        runs={"prefill": (padded, unpadded), "steps": (batch_generated, each_generated)}),
    "static cache": Way('`cache_implementation="static"`', runs={"steps": (in_static_cache, steps)}),
    "assisted generation": Way(
        "`generate(assistant_model=...)`, which is not patched", runs={"steps": (assisted, generated)}),
    "prompt lookup": Way("`generate(prompt_lookup_num_tokens=4)`", runs=generating(prompt_lookup_num_tokens=4)),
    "early exit": Way("`generate(assistant_early_exit=2)`", runs=generating(assistant_early_exit=2)),
    "deterministic": Way("`torch.use_deterministic_algorithms`", within=deterministic),
    "hooks": Way("hooks of a user around every module", after=hooked),
    "deepcopy": Way("a copy (`copy.deepcopy`)", after=copied),
    "pickle": Way("a pickle", after=lambda model, folder: pickle.loads(pickle.dumps(model))),
    "DDP": Way(
        "DistributedDataParallel, one process",
        after=lambda model, folder: nn.parallel.DistributedDataParallel(model),
        runs={"training": (training, training)}),
    "DataParallel": Way("DataParallel", after=replica, runs=INFERENCE),
    "FSDP2": Way("the patch, then `fully_shard`, one process", after=sharded),
}  # fmt: skip

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
ELSEWHERE = (
    ("tensor parallel (`tp_plan`), two processes", "tests/model/test_tensor_parallel.py"),
    ("DDP, FSDP2 and ZeRO-3, two processes", "tests/training/test_launch.py"),
    ("int8 of torch, torchao, bitsandbytes, quanto, compressed-tensors; layers as of GPTQ and AWQ; QLoRA",
     "tests/model/test_quantized.py"),
    ("compiled steps", "tests/model/test_attention_generation.py"),
    ('`cache_implementation="quantized"`, and on a GPU `"offloaded"`', "tests/model/test_attention_generation.py"),
)  # fmt: skip
"""Ways that need other libraries or processes, with the tests that hold them."""

_TABLES = "longer table", "bias for a table"
_NATIVE = (*_TABLES, "bias for an encoder", "scaled T5 bias", "scaled ALiBi")
UNPATCHED: dict[tuple[str, str], str] = {
    **{("early exit", kind): "list index out of range" for kind in (*_TABLES, "scaled ALiBi")},
    ("torch.func.grad", "scaled ALiBi"): "setup_context",
}
"""Cells that do not run unpatched either, by way and kind, with words of the error."""

REFUSED: dict[tuple[str, str], str] = {
    **{(f"{way} offload", kind): "are offloaded" for way in ("CPU", "disk") for kind in _NATIVE},
    **{("meta device", kind): "without weights. Load" for kind in _NATIVE},
    ("torch.export", "dynamic by row"): "cannot trace dynamic_ntk",
    **{
        ("DataParallel", kind): "does not run this patch"
        for kind in ("trained bias", "bias for a table", "bias for an encoder", "scaled ALiBi")
    },
    **{
        (way, "dynamic by request"): "in the first forward of a text"
        for way in ("assisted generation", "early exit", "prompt lookup")
    },
}
"""Cells that are refused, by way and kind, with words of the error."""

LENGTHS_DIFFER = {
    (way, "dynamic by sequence") for way in ("assisted generation", "prompt lookup", "padding")
}
"""Cells whose tokens depend on the way, so that its own run in float64 is the truth."""

REASONS = {
    "are offloaded": "Positions are found by reading the weights of this model. Patch it before that.",
    "without weights. Load": "Positions are found by reading the weights of this model. Load them before the patch.",
    "cannot trace dynamic_ntk": (
        'Tokens are computed in groups that depend on their positions. Export `update="sequence"` or `"request"`.'
    ),
    "does not run this patch": (
        "Copies on other GPUs would read weights of the first. Use a process for each (`accelerate launch`)."
    ),
    "in the first forward of a text": (
        'Drafts in the first forward would count in the length of the request. `update="row"` takes them.'
    ),
}
"""The reason of a refusal in a sentence, by the words of its error."""


PAGE_TEXT = """\
# Ways to run a patched model

<!-- Generated by `python -m tests.support.ways_to_run`; do not edit. -->

Look up here whether a patched model may be run in your way. The table has ways to run a model, and kinds of patches.
Each cell is a test (`tests/model/test_ways_to_run.py`) on a tiny model on a CPU. It compares logits, generated tokens
or gradients with those of the same patch in float64. The error is at most four times that of the unpatched model in
the same way, plus 1e-4 of the largest value.

{kinds}

✓ is right, a number is refused for the reason below (which is tested too), and – does not run unpatched, or
is not tested for such models.

{ways}

{reasons}

✓*: as in transformers' own dynamic NTK, the length of the longest text of a batch counts for all, and drafts
count while they are in it. So tokens may differ from those of one text without drafts.

Other ways need several processes, libraries or a GPU, and have tests of their own:

{elsewhere}
"""


def page() -> str:
    """Return the table as a page of the documentation."""
    numbers = {words: str(number) for number, words in enumerate(REASONS, 1)}

    def mark(way: str, kind: str) -> str:
        if (way, kind) in REFUSED:
            return numbers[REFUSED[way, kind]]
        if (way, kind) in LENGTHS_DIFFER:
            return "✓*"
        return "✓" if WAYS[way].pairs(KINDS[kind]) and (way, kind) not in UNPATCHED else "–"

    kinds = [[n, f"{k.model}, `patch_model(model, {k.words})`", k.others] for n, k in KINDS.items()]
    ways = [[way.sentence, *(mark(name, kind) for kind in KINDS)] for name, way in WAYS.items()]
    return PAGE_TEXT.format(
        kinds=markdown_table(["kind", "tested as", "stands for"], kinds),
        ways=markdown_table(["way to run", *KINDS], ways),
        reasons="\n".join(f"{number}. {REASONS[words]}" for words, number in numbers.items()),
        elsewhere=markdown_table(
            ["way to run", "tests"], [[sentence, f"`{tests}`"] for sentence, tests in ELSEWHERE]
        ),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
