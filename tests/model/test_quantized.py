"""Models whose weights are no plain tensors at hand: quantized by libraries, offloaded, sharded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hf_posenc
from hf_posenc import get_patch, inspect_rope, load_patch, patch_model, save_patch, unpatch_model
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.evaluation.measuring.identity import check_weights, weights_hash
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.model.unwrapping import trial
from hf_posenc.model.weights import damaged_weights, is_quantized, plain_parts
from hf_posenc.verification import verify_export
from tests.support import zoo
from tests.support.selection import covering, quick
from tests.support.ways_to_run import offloaded, on_disk, sharded
from tests.support.zoo import CACHE

METHODS: dict[str, dict[str, Any]] = {"yarn": {"scale": 4}, "rerope": {"window": 16}, "fire": {}}
IDS = zoo.tokens(40)
SLOW = pytest.mark.slow

Options = Callable[[], dict[str, Any]]
Change = Callable[[Any, Path], Any]


def torchao(make: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="needs torchao")
    return {"quantization_config": transformers.TorchAoConfig(make(quantization)), **options}


def with_config(package: str, name: str, **knobs: Any) -> dict[str, Any]:
    pytest.importorskip(package, reason=f"needs {package}")
    return {"quantization_config": getattr(transformers, name)(**knobs)}


LOADED: dict[str, Options] = {
    "torchao int8": lambda: torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int8 dynamic": lambda: torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()),
    "torchao int4": lambda: torchao(
        lambda q: q.IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"])
    ),
    "torchao float8": lambda: torchao(lambda q: q.Float8WeightOnlyConfig(), dtype=torch.bfloat16),
    "bitsandbytes 4": lambda: with_config("bitsandbytes", "BitsAndBytesConfig", load_in_4bit=True),
    "bitsandbytes 8": lambda: with_config("bitsandbytes", "BitsAndBytesConfig", load_in_8bit=True),
    "quanto int8": lambda: with_config("optimum.quanto", "QuantoConfig", weights="int8"),
    "quanto int4": lambda: with_config("optimum.quanto", "QuantoConfig", weights="int4"),
}
"""What quantizes the weights of a checkpoint when it is loaded."""


class PackedLinear(nn.Module):
    """Four bits in int32 buffers and scales for 32 inputs: a layer of GPTQ, whose kernels no CPU of a test has.

    AWQ packs the outputs instead.
    """

    def __init__(self, linear: nn.Linear, axis: int) -> None:
        super().__init__()
        self.axis = axis
        weight = linear.weight.detach().T  # (in, out)
        groups = weight.unflatten(0, (-1, 32))
        scales = groups.abs().amax(1, keepdim=True) / 7
        codes = (groups / scales).round().add(8).clamp(0, 15).flatten(0, 1).int()
        shifts = self._shifts(packed := codes.unflatten(axis, (-1, 8)))
        self.register_buffer("qweight", (packed << shifts).sum(axis + 1, dtype=torch.int32))
        self.register_buffer("scales", scales)

    def _shifts(self, packed: Tensor) -> Tensor:
        shape = [8 if axis == self.axis + 1 else 1 for axis in range(packed.dim())]
        return torch.arange(0, 32, 4, dtype=torch.int32).view(shape)

    def forward(self, x: Tensor) -> Tensor:
        packed = (
            self.get_buffer("qweight").unsqueeze(self.axis + 1).repeat_interleave(8, self.axis + 1)
        )
        codes = ((packed >> self._shifts(packed)) & 15).flatten(self.axis, self.axis + 1)
        groups = (codes - 8).unflatten(0, (-1, 32)) * self.get_buffer("scales")
        return x @ groups.flatten(0, 1)


def packed(axis: int) -> Change:
    def change(model: Any, folder: Path) -> Any:
        for module in [*model.model.layers.modules()]:
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child, axis))
        model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
        return model

    return change


def compressed(model: Any, folder: Path) -> Any:
    """The model of a checkpoint of compressed-tensors, which is decompressed by its first forward."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    of: Any = importlib.import_module("compressed_tensors.quantization")
    weights = of.QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
    )
    config = of.QuantizationConfig(
        config_groups={"all": of.QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    )
    of.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, 32))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / 7)
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    compressors.ModelCompressor.from_pretrained_model(
        model, quantization_format="pack-quantized"
    ).compress_model(model)
    model.config.quantization_config = {**config.to_dict(), "quant_method": "compressed-tensors"}
    model.save_pretrained(folder / "compressed")
    return LlamaForCausalLM.from_pretrained(folder / "compressed")


def dispatched(*on_disk: str) -> Change:
    def change(model: Any, folder: Path) -> Any:
        parts = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
        places = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
        options: dict[str, Any] = {"offload_folder": str(folder / "disk")}
        model.save_pretrained(folder / "whole")
        return LlamaForCausalLM.from_pretrained(
            folder / "whole", device_map=places | dict.fromkeys(on_disk, "disk"), **options
        )

    return change


def dynamic(model: Any, folder: Path) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


CHANGED: dict[str, Change] = {
    "torch dynamic int8": dynamic,
    "compressed-tensors": compressed,
    "GPTQ": packed(0),
    "AWQ": packed(1),
    "cpu_offload": offloaded,
    "disk_offload": on_disk,
    "device_map": dispatched("model.layers.0"),
    "device_map, first weights": dispatched("model.embed_tokens", "model.layers.1"),
    "DTensor": sharded,
}
"""What is done with a loaded model."""

PLAIN = ("cpu_offload", "disk_offload", "device_map", "device_map, first weights", "DTensor")
# These round by the largest number of a batch, so a single token is rounded otherwise.
OF_A_BATCH = ("bitsandbytes 8", "torch dynamic int8", "torchao int8 dynamic")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "model"
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    model = zoo.build("llama", num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def load(kind: str, checkpoint: Path, folder: Path) -> Any:
    options = LOADED[kind]() if kind in LOADED else {}
    model = LlamaForCausalLM.from_pretrained(checkpoint, **options).eval()
    return CHANGED[kind](model, folder).eval() if kind in CHANGED else model


def load_patched(kind: str, checkpoint: Path) -> Any:
    return patch_model(load(kind, checkpoint, checkpoint), "yarn", scale=4)


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **arguments: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **arguments).logits
    return found.float()


@torch.no_grad()
def off_by_steps(model: Any) -> float:
    """How far the logits of cached steps are from those of one forward, relative to the largest."""
    whole, parts = logits(model), []
    cache = model(input_ids=IDS[:, :36], use_cache=True)[CACHE]
    parts = [logits(model, IDS[:, n : n + 1], **{CACHE: cache}) for n in range(36, 40)]
    return float((torch.cat(parts, 1) - whole[:, 36:]).abs().max() / whole.abs().max())


@pytest.mark.filterwarnings("ignore::hf_posenc.errors.UntrainedWarning")
@pytest.mark.parametrize(
    "kind", quick([*LOADED, *CHANGED], ("torch dynamic int8", "GPTQ", "cpu_offload", "device_map"))
)
def test_they_are_patched_run_undone_saved_and_loaded(
    kind: str, checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "DTensor":
        request.getfixturevalue("group")
    model = load(kind, checkpoint, tmp_path)
    before, own_steps, own_hash = logits(model), off_by_steps(model), weights_hash(model)
    assert is_quantized(model) == (kind not in PLAIN)
    check_weights(model)
    for number, (method, options) in enumerate(METHODS.items()):
        folder = tmp_path / str(number)
        patch_model(model, method, **options)
        after = logits(model)
        assert zoo.relative_difference(after, before) > 0.05
        assert off_by_steps(model) <= (0.5 if kind in OF_A_BATCH else 2 * own_steps + 1e-5)
        assert str(inspect_rope(model))
        assert str(get_patch(model))
        save_patch(model, folder)
        unpatch_model(model)
        assert torch.equal(logits(model), before)
        assert weights_hash(model) == own_hash
        assert torch.equal(logits(load_patch(model, folder)), after)
        unpatch_model(model)


@pytest.mark.parametrize(("kind", "method"), covering(PLAIN, ["yarn", "rerope"]))
def test_where_weights_are_changes_no_logits(
    kind: str, method: str, checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "DTensor":
        request.getfixturevalue("group")
    models = LlamaForCausalLM.from_pretrained(checkpoint), load(kind, checkpoint, tmp_path)
    scorers = [TokenScorer(model, IDS[0], prefill=16) for model in models]
    assert scorers[0].exact == scorers[1].exact  # by the CPU, how products of few rows round
    assert torch.equal(*(scorer(IDS[0]) for scorer in scorers))
    whole, elsewhere = (logits(patch_model(model, method, **METHODS[method])) for model in models)
    assert torch.equal(whole, elsewhere)
    scorers = [TokenScorer(model, IDS[0], prefill=16) for model in models]
    assert torch.equal(*(scorer(IDS[0]) for scorer in scorers))
    hashes = [weights_hash(unpatch_model(model)) for model in models]
    assert hashes[0] == hashes[1]
    with torch.no_grad():
        models[0].model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6
    assert weights_hash(models[0]) != hashes[1]


@pytest.mark.filterwarnings("ignore:Plain transformers cannot")
@pytest.mark.parametrize(("kind", "method"), covering(LOADED, ["yarn", "rerope"]))
def test_a_saved_patch_is_quantized_when_it_is_loaded(
    kind: str, method: str, checkpoint: Path, tmp_path: Path
) -> None:
    plain = patch_model(LlamaForCausalLM.from_pretrained(checkpoint), method, **METHODS[method])
    plain.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path, **LOADED[kind]())
    model = patch_model(load(kind, checkpoint, tmp_path), method, **METHODS[method])
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "kind",
    [
        "bitsandbytes 4",
        *(pytest.param(kind, marks=SLOW) for kind in ("torchao int8", "bitsandbytes 8")),
    ],
)
def test_quantized_weights_are_saved_with_their_patch_and_verified(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = load_patched(kind, checkpoint)  # a trial must not change what is saved
    model.save_pretrained(tmp_path / "saved")
    loaded: Any = hf_posenc.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(load_patched(kind, checkpoint)))
    assert verify_export(tmp_path / "saved", loaded).passed


@pytest.mark.filterwarnings("ignore::hf_posenc.errors.UntrainedWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_lora_is_trained_on_four_bits(method: str, checkpoint: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = load("bitsandbytes 4", checkpoint, tmp_path)
    model = peft.prepare_model_for_kbit_training(patch_model(base, method, **METHODS[method]))
    modules = ["posenc"] if method == "fire" else None
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules)
    model = peft.get_peft_model(model, config).train()
    with trial(model):  # as a measurement before the training
        logits(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.tensor(losses).isfinite().all()
    assert losses[-1] < losses[0]
    with trial(model):
        expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    base = peft.prepare_model_for_kbit_training(load("bitsandbytes 4", checkpoint, tmp_path))
    loaded: Any = hf_posenc.load_adapter(base, tmp_path / "adapter")
    assert zoo.in_force(loaded).method == method
    with trial(loaded):
        assert torch.equal(logits(loaded), expected)


class Unreadable(Tensor):
    """A weight of a library that gives hf_posenc no parts to read."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of {cls.__name__}")


def named(model: nn.Module) -> Mapping[str, Tensor]:
    return dict(model.named_parameters())


def test_parts_of_quantized_weights_are_checked(checkpoint: Path, tmp_path: Path) -> None:
    model = load("torchao int8", checkpoint, tmp_path)
    assert damaged_weights(named(model).items()) is None
    codes, scale, *_ = plain_parts(model.model.layers[1].mlp.up_proj.weight)
    assert codes.dtype == torch.int8
    scale.view(-1)[0] = float("nan")
    assert "layers.1.mlp.up_proj.weight has NaN" in str(damaged_weights(named(model).items()))
    with pytest.raises(PosencError, match="not finite"):
        check_weights(model)


def test_offloaded_weights_are_checked_by_what_measures(checkpoint: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.model.layers[1].mlp.up_proj.weight.data[3, 0] = float("nan")
    model = offloaded(model, tmp_path)
    with pytest.raises(PosencError, match=r"up_proj\.weight has NaN"):
        check_weights(model)


def test_weights_that_cannot_be_read_are_named(checkpoint: Path) -> None:
    weights = dict(named(LlamaForCausalLM.from_pretrained(checkpoint)))
    unreadable = weights["lm_head.weight"].detach().as_subclass(Unreadable)
    with pytest.warns(UserWarning, match=r"Unreadable \(such as lm_head.weight\).* not checked"):
        assert damaged_weights({**weights, "lm_head.weight": unreadable}.items()) is None


def test_an_embedding_alone_is_no_model_of_zeros() -> None:
    table = torch.ones(4, 4)
    table[0] = 0  # padding
    assert damaged_weights([("embedding", table)], sampled=True) is None
    assert damaged_weights([("embedding", table * 0)], sampled=True) is not None
    codes = torch.zeros(4, 4, dtype=torch.int8)
    assert damaged_weights([("embedding", table * 0), ("codes", codes)]) is None


def test_positions_in_offloaded_embeddings_are_refused() -> None:
    model: Any = zoo.build("gpt2")
    with torch.no_grad():
        expected = logits(patch_model(model, "interpolate", scale=2))
    unpatch_model(model)
    for block in model.transformer.h:
        accelerate.cpu_offload(block, torch.device("cpu"))
    assert torch.equal(logits(patch_model(model, "interpolate", scale=2)), expected)
    unpatch_model(model)
    accelerate.cpu_offload(model.transformer.wpe, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"transformer\.wpe are offloaded"):
        patch_model(model, "interpolate", scale=2)
    assert get_patch(model) is None


@pytest.mark.parametrize("method", ["yarn", "rerope", "log_n"])
def test_rounding_of_activations_is_no_second_source_of_positions(method: str) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization", reason="needs torchao")
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
    model = zoo.build("llama", **sizes)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    patch_model(model, method, **METHODS.get(method, {}))
    assert get_patch(model) is not None
