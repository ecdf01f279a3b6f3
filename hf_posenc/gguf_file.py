"""GGUF files as models: their header, the config that it describes, and the origin of the weights.

transformers reads the weights and the tokenizer (`gguf_file=`). It ignores most of what the metadata says about rotary
embeddings. `read_gguf_config` restores that, or raises where no config of transformers can express it.

The format is ggml's `docs/gguf.md`; the keys are those of `gguf-py/gguf/constants.py` in llama.cpp.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import mmap
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc import catalog
from hf_posenc.errors import PosencError, one_line

SUFFIX = ".gguf"
ORIGIN = "gguf_source"
"""The attribute of a config that names the file of the weights, and the number of weights of each tensor type."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors of a GGUF file that hold divisors of frequencies."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of floating-point numbers, as GGUF and safetensors files name them."""

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
# Long lists that describe the tokenizer and not the model.
_VOCABULARY = tuple(f"tokenizer.ggml.{key}" for key in ("tokens", "scores", "token_type", "merges"))
_CONFIG_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a GGUF file: its type's name, its shape as in torch, and its place in the file in bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a GGUF file."""

    path: Path
    architecture: str  # the name in front of the model's keys
    values: Mapping[str, Any]  # the metadata; of a list, its length alone unless it is short
    tensors: Mapping[str, Stored]  # the tensors, by name
    fields: Mapping[str, bytes]  # the bytes of each key with its value

    def get(self, key: str) -> Any:
        """Return a value of the model's own keys, such as `rope.freq_base`; `None` if it is absent."""
        return self.values.get(f"{self.architecture}.{key}")

    @property
    def rope(self) -> dict[str, Any]:
        """The keys about rotary embeddings, without the architecture's name, and the tensors by name."""
        front = f"{self.architecture}."
        keys = {key.removeprefix(front): value for key, value in self.values.items()}
        tensors = {name: self.tensors[name] for name in ROPE_TENSORS if name in self.tensors}
        return {key: value for key, value in keys.items() if key.startswith("rope.")} | {
            name: f"of {math.prod(tensor.shape)} divisors" for name, tensor in tensors.items()
        }

    @property
    def kinds(self) -> dict[str, int]:
        """The number of weights of each tensor type, most frequent first."""
        count: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            if name not in ROPE_TENSORS:
                count[tensor.kind] += math.prod(tensor.shape)
        return dict(count.most_common())

    def divisors(self, name: str) -> list[float]:
        """Return the numbers of a tensor of `ROPE_TENSORS`."""
        import numpy as np

        if (tensor := self.tensors[name]).kind != "F32":
            raise PosencError(f"{self.path} has {name} as {tensor.kind}: convert it again, to F32.")
        count = math.prod(tensor.shape)
        return [float(x) for x in np.fromfile(self.path, "<f4", count, offset=tensor.start)]

    def describe(self) -> list[str]:
        """Return lines that describe the weights, and what the file says about rotary embeddings."""
        total, context = sum(self.kinds.values()) or 1, self.get("context_length")
        kinds = ", ".join(f"{kind} ({count / total:.1%})" for kind, count in self.kinds.items())
        keys = ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in {"context_length": context, **self.rope}.items()
        )
        return [
            f"GGUF file of the architecture {self.architecture}, weights: {kinds}.",
            f"Its metadata: {keys}.",
        ]


def require_gguf() -> Any:
    """Return the package gguf; raise if it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise PosencError(
            "GGUF files are read with the package gguf: pip install 'hf-posenc[gguf]'."
        ) from error
    return gguf


def find_gguf(path_or_id: Any) -> Path | None:
    """Return the GGUF file of a path or of a name of the catalog, or else `None`.

    It is the path itself, or the one file in a folder without a config. Files and folders come before names.
    """
    if not isinstance(path_or_id, str | Path) or not str(path_or_id).strip():
        return None
    path = Path(path_or_id)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        return path if magic == b"GGUF" or path.suffix == SUFFIX else None
    if not path.is_dir():
        if path.suffix == SUFFIX:
            raise PosencError(f"There is no file {path}. Give a GGUF file that exists.")
        return catalog.fetched(str(path))[0] if str(path) in catalog.checkpoints() else None
    if any((path / name).exists() for name in _CONFIG_FILES):
        return None
    if len(files := sorted(path.glob(f"*{SUFFIX}"))) > 1:
        listed = ", ".join(file.name for file in files)
        raise PosencError(
            f"The folder {path} has {len(files)} GGUF files ({listed}). Give one of them: {files[0]}"
        )
    return files[0] if files else None


def read_header(path: str | Path) -> Header:
    """Read the header of a GGUF file, and no weights; raise for what is no whole file of version 2 or 3."""
    require_gguf()
    state = Path(path).stat()
    return _read_header(Path(path), state.st_size, state.st_mtime_ns)


# `gguf.GGUFReader` makes objects of every token: about 200 times as long for a vocabulary of 128,000.
@functools.lru_cache(maxsize=4)
def _read_header(path: Path, size: int, _changed: int) -> Header:
    damaged = f"{path} is not a GGUF file, or damaged or incomplete"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            if blob[:4] != b"GGUF":
                raise PosencError(f"{path} is not a GGUF file: it does not start with GGUF.")
            (version,) = struct.unpack_from("<I", blob, 4)
            if version not in (2, 3):
                raise PosencError(
                    f"{path} is a GGUF file of version {version}, or big-endian: versions 2 and 3 can be read."
                )
            return _parse(path, blob, size)
    except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        if isinstance(error, PosencError):
            raise
        raise PosencError(f"{damaged} ({one_line(error)}): download it again.") from error


def _parse(path: Path, blob: Any, size: int) -> Header:
    types, sizes = require_gguf().GGMLQuantizationType, require_gguf().GGML_QUANT_SIZES
    tensor_count, key_count = struct.unpack_from("<QQ", blob, 8)
    values, fields, place = dict[str, Any](), dict[str, bytes](), 24
    for _ in range(key_count):
        start = place
        key, place = _string(blob, place)
        (kind,) = struct.unpack_from("<I", blob, place)
        values[key], place = _value(blob, place + 4, kind)
        if key not in _VOCABULARY:
            fields[key] = blob[start:place]
    places = dict[str, tuple[Any, tuple[int, ...], int]]()
    for _ in range(tensor_count):
        name, place = _string(blob, place)
        (rank,) = struct.unpack_from("<I", blob, place)
        if rank > 8:
            raise ValueError(f"a tensor of rank {rank}")
        *shape, number, offset = struct.unpack_from(f"<{rank}QIQ", blob, place + 4)
        places[name] = types(number), tuple(reversed(shape)), offset
        place += 4 + 8 * rank + 12
    if values.get("split.count", 1) > 1:
        raise PosencError(
            f"{path} is one of {values['split.count']} parts. Merge them with llama.cpp's llama-gguf-split --merge."
        )
    alignment = int(values.get("general.alignment", 32))
    data, end = -(-place // alignment) * alignment, place
    tensors = dict[str, Stored]()
    for name, (kind, dimensions, offset) in places.items():
        block, width = sizes[kind]
        tensors[name] = Stored(kind.name, dimensions, data + offset)
        end = max(end, data + offset + math.prod(dimensions) // block * width)
    if end > size:
        raise ValueError(f"it has {size:,} bytes of {end:,}")
    return Header(path, str(values["general.architecture"]), values, tensors, fields)


def _string(blob: Any, place: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", blob, place)
    if (end := place + 8 + length) > len(blob):
        raise ValueError("a text ends after the file")
    return blob[place + 8 : end].decode("utf-8", "replace"), end


def _value(blob: Any, place: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(blob, place)
    if kind != _ARRAY:
        code = f"<{_SCALARS[kind]}"
        return struct.unpack_from(code, blob, place)[0], place + struct.calcsize(code)
    inner, count = struct.unpack_from("<IQ", blob, place)
    place += 12
    if inner in _SCALARS:
        code = f"<{count}{_SCALARS[inner]}"
        values = list(struct.unpack_from(code, blob, place)) if count <= 1024 else count
        return values, place + count * struct.calcsize(f"<{_SCALARS[inner]}")
    for _ in range(count):
        if inner == _STRING:  # a vocabulary: nothing but its length is needed
            place += 8 + struct.unpack_from("<Q", blob, place)[0]
        else:
            _, place = _value(blob, place, inner)
    return count, place


def read_gguf_config(path: str | Path) -> Any:
    """Return transformers' config of a GGUF file, with the file's rotary embedding and the origin of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    header = read_header(path)
    with tempfile.TemporaryDirectory() as folder:
        (stub := Path(folder, "header.gguf")).write_bytes(_stub(header))
        try:  # transformers reads the vocabulary several times, which takes seconds
            config = AutoConfig.from_pretrained(folder, gguf_file=str(stub))
        except Exception:
            config = None
    if config is None:  # an architecture that needs the vocabulary
        file = Path(path).resolve()
        config = AutoConfig.from_pretrained(file.parent, gguf_file=str(file))
    vars(config).pop("_model_name_or_path", None)
    config._name_or_path = str(path)
    text = config.get_text_config(decoder=True)
    if tokens := header.get("vocab_size") or header.values.get("tokenizer.ggml.tokens"):
        text.vocab_size = tokens
    _set_rope(header, text)
    causal: Any = AutoModelForCausalLM._model_mapping
    if not config.architectures and type(config) in causal:  # servers choose their code by it
        config.architectures = [causal[type(config)].__name__]
    setattr(config, ORIGIN, {"file": Path(path).name, "tensor_types": header.kinds})
    return config


def _stub(header: Header) -> bytes:
    """Return a GGUF file with the same metadata without the vocabulary, and the same tensors without their weights."""
    fields = dict(header.fields)
    key = f"{header.architecture}.vocab_size"
    if key not in fields and (tokens := header.values.get("tokenizer.ggml.tokens")):
        fields[key] = _packed(key) + struct.pack("<II", 4, tokens)
    tensors = (_packed(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in header.tensors)
    count = struct.pack("<QQ", len(header.tensors), len(fields))
    content = b"".join((b"GGUF", struct.pack("<I", 3), count, *fields.values(), *tensors))
    alignment = int(header.values.get("general.alignment", 32))
    return content + bytes(-len(content) % alignment + alignment)


def _packed(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


# Rotary embeddings: what llama.cpp reads (`llama_model::load_hparams`), in the terms of transformers.

_READ = ("type", "factor", "attn_factor", "original_context_length", "finetuned")
_READ_YARN = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor")
_OTHER_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_ORIGINAL = "original_max_position_embeddings"


def _set_rope(header: Header, text: Any) -> None:
    """Give a text config the rotary embedding of the file; raise where it cannot have that."""
    rope = getattr(text, "rope_parameters", None)
    scaling = _scaling(header, text)
    if not rope:
        if scaling or header.get("rope.freq_base"):
            raise _inexpressible(header, f"{text.model_type} lacks rope_parameters in transformers")
        return
    for entry in rope.values():  # a table with pairs that do not rotate, which its config has
        if isinstance(entry, dict) and entry.get("rope_type") == "proportional" and scaling:
            factors = scaling.get("long_factor", (0.0,))
            scaling = {} if all(f == 1 or f > 1e29 for f in factors) else scaling
    bases = dict.fromkeys(("", "full_attention"), "rope.freq_base")
    bases["sliding_attention"] = "rope.freq_base_swa"
    by_layer = all(isinstance(entry, dict) for entry in rope.values())
    entries = {label: dict(entry) for label, entry in (rope if by_layer else {"": rope}).items()}
    for label, entry in entries.items():
        if (theta := header.get(bases.get(label, ""))) is not None:
            entry["rope_theta"] = float(theta)
        if label != "sliding_attention":
            entries[label] = _scaled(entry, scaling)
    if not by_layer:
        _set_dimension(header, text, entries[""])
    text.rope_parameters = entries if by_layer else entries[""]


def _set_dimension(header: Header, text: Any, entry: dict[str, Any]) -> None:
    """Set the rotated part of each head where the file has another one than the config."""
    count = header.get("rope.dimension_count")
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not count or count == int(head * entry.get("partial_rotary_factor", 1.0)):
        return
    if "partial_rotary_factor" not in entry:
        raise _inexpressible(
            header,
            f"it rotates {count} of the {head} dimensions of each head, {text.model_type} all of them",
        )
    entry["partial_rotary_factor"] = count / head


def _scaled(entry: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a table with the file's scaling in place of the one that its class has by default."""
    before = entry.get("rope_type", "default")
    if not scaling and before not in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        return dict(entry)
    scaling = scaling or {"rope_type": "default"}
    kept = (*_OTHER_KEYS, *(("truncate",) if before == scaling["rope_type"] else ()))
    return {**{key: entry[key] for key in kept if key in entry}, **scaling}


def _scaling(header: Header, text: Any) -> dict[str, Any]:
    """Return the `rope_parameters` of the file's scaling without the base; empty if there is none."""
    front = f"{header.architecture}.rope.scaling."
    keys = {
        key.removeprefix(front): value
        for key, value in header.values.items()
        if key.startswith(front)
    }
    divisors = {name: header.divisors(name) for name in ROPE_TENSORS if name in header.tensors}
    # Without a type llama.cpp takes linear scaling; the key scale_linear is from before it had types.
    kind = keys.get("type", "linear")
    factor = float(keys.get("factor") or header.get("rope.scale_linear") or 1.0)
    magnitude = float(keys.get("attn_factor", 1.0))
    if foreign := sorted(keys.keys() - {*_READ, *_READ_YARN}):
        raise _inexpressible(
            header, f"no config has its rope.scaling.{foreign[0]} = {keys[foreign[0]]}"
        )
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise _inexpressible(header, f"the type {kind!r} is unknown")
    if divisors:
        if kind in ("linear", "yarn") and factor != 1:
            raise _inexpressible(
                header, f"no config has a table ({next(iter(divisors))}) and {kind} scaling"
            )
        return _of_divisors(header, text, divisors, magnitude)
    if kind == "yarn" and factor != 1:
        return _yarn(header, keys, factor, magnitude)
    if magnitude != 1:
        raise _inexpressible(
            header, f"no config has rope.scaling.attn_factor = {magnitude:g} without a table"
        )
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "factor": factor}
    if kind == "longrope":
        raise _inexpressible(header, "its type is longrope, and it has no factors")
    return {}


def _yarn(
    header: Header, keys: Mapping[str, Any], factor: float, magnitude: float
) -> dict[str, Any]:
    if keys.get("yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1: the default
        raise _inexpressible(
            header, f"no config has rope.scaling.yarn_ext_factor = {keys['yarn_ext_factor']:g}"
        )
    original = keys.get("original_context_length") or header.get("context_length")
    values: dict[str, Any] = {"rope_type": "yarn", "factor": factor, _ORIGINAL: int(original)}
    values |= {
        key: float(keys[f"yarn_{key}"])
        for key in ("beta_fast", "beta_slow")
        if f"yarn_{key}" in keys
    }
    if "yarn_attn_factor" in keys:
        values["attention_factor"] = magnitude * float(keys["yarn_attn_factor"])
    elif magnitude != 1:
        values["attention_factor"] = magnitude * (1.0 + 0.1 * math.log(factor))
    return values


def _of_divisors(
    header: Header, text: Any, divisors: Mapping[str, list[float]], magnitude: float
) -> dict[str, Any]:
    """Return the scaling that divides the frequencies by these lists: Llama 3's formula if it gives them."""
    context = int(header.get("context_length") or text.max_position_embeddings)
    original = int(header.get("rope.scaling.original_context_length") or context)
    if (single := divisors.get(ROPE_TENSORS[0])) is None:
        if absent := [name for name in ROPE_TENSORS[1:] if name not in divisors]:
            raise _inexpressible(header, f"it lacks {absent[0]}")
        short, long = (divisors[name] for name in ROPE_TENSORS[1:])
    else:
        short = long = single
        if all(divisor == 1 for divisor in single) and magnitude == 1:
            return {}
        theta = header.get("rope.freq_base") or text.rope_parameters.get("rope_theta")
        if magnitude == 1 and theta and (by_formula := _llama3(single, float(theta))):
            return by_formula
    lists = {"short_factor": short, "long_factor": long, "attention_factor": magnitude}
    lengths = {"factor": max(1.0, context / original), _ORIGINAL: original}
    return {"rope_type": "longrope", **lists, **lengths}


def _llama3(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Return Llama 3's scaling if its formula gives these divisors, with `low_freq_factor` 1 as in every release.

    Between the ends `(1/divisor - 1/s) / (1 - 1/s)` is linear in the frequency. Its slope and offset give the length
    and `high_freq_factor`; the formula then has to give every divisor.
    """
    import torch

    from hf_posenc.methods import Llama3
    from hf_posenc.rope import RopeSpec

    scale = max(divisors)
    rope = RopeSpec(2 * len(divisors), theta, 1)
    frequencies, given = rope.default_inv_freq(), torch.tensor(divisors, dtype=torch.float64)
    inside = (given > 1.0 + 1e-6) & (given < scale * (1.0 - 1e-6))
    if scale <= 1 or int(inside.sum()) < 2:
        return None
    blend = (1 / given[inside] - 1 / scale) / (1 - 1 / scale)
    rows = torch.stack((frequencies[inside], torch.ones_like(blend)), dim=1)
    slope, offset = (float(x) for x in torch.linalg.lstsq(rows, blend[:, None]).solution.flatten())
    if not (slope > 0 > offset):
        return None
    high = 1 - 1 / offset
    original = round(slope * 2 * math.pi * (high - 1))
    for high_freq_factor in (float(round(high)), high):
        if original < 1 or high_freq_factor <= 1:
            continue
        formula = Llama3(scale=scale, high_freq_factor=high_freq_factor)
        rope = RopeSpec(2 * len(divisors), theta, original)
        if torch.allclose(frequencies / formula.inv_freq(rope), given, rtol=1e-5, atol=0):
            return formula.rope_parameters(rope)
    return None


def _inexpressible(header: Header, reason: str) -> PosencError:
    return PosencError(
        f"The rotary embedding of {header.path} cannot be expressed in transformers: {reason}. Give the checkpoint "
        "that the file was converted from."
    )


# Weights


@contextlib.contextmanager
def loading_gguf() -> Iterator[None]:
    """Let transformers read a GGUF file once, and show its progress bar by transformers' own setting.

    transformers parses the whole vocabulary for the tokenizer's config and again for the weights, and builds the map of
    names once for every module of the model: most of the time that a small file takes.
    """
    import transformers.modeling_gguf_pytorch_utils as module
    from transformers.utils import logging

    names: Any = module
    changes: list[tuple[Any, str, Any]] = [(names, "tqdm", logging.tqdm)]
    if importlib.util.find_spec("gguf") is not None:
        import gguf

        load = names.load_gguf_checkpoint
        metadata = functools.cache(load)

        def load_once(path: Any, return_tensors: bool = False, **options: Any) -> Any:
            if return_tensors:
                return load(path, return_tensors=True, **options)
            return copy.deepcopy(metadata(path))

        changes += [
            (gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
            (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
            (names, "load_gguf_checkpoint", load_once),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def loading_options(path: Path) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a GGUF file, whose weights shall be dequantized."""
    import transformers

    # An absolute path, since transformers would take a file of this name in the working directory first.
    options: dict[str, Any] = {"gguf_file": str(path.resolve())}
    # Newer versions may keep the blocks, which cannot be trained or saved.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


def as_plain_model(model: Any, path: Path) -> None:
    """Remove the marks of a quantizer from a dequantized model, and warn of weights that it has no use for."""
    if vars(model).pop("hf_quantizer", None) is not None:
        model.is_quantized = False
    for name in ("quantization_config", "quantization_method"):
        for owner in (model, model.config):
            vars(owner).pop(name, None)
    model.config._name_or_path = model.name_or_path = str(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = (tensor for name, tensor in model.state_dict().items() if name not in parameters)
    held = sum(tensor.numel() for tensor in (*model.parameters(), *buffers))
    if (stored := sum(read_header(path).kinds.values())) > held:
        warnings.warn(
            f"{path} has {stored - held:,} weights that {type(model).__name__} of transformers has no place for: its "
            "numbers may be wrong. Compare with the checkpoint that it was converted from.",
            stacklevel=3,
        )


def origin_of(config: Any, dtype: str) -> str:
    """Return the tensor types that a model's weights come from, such as "Q4_0 GGUF, dequantized to float32".

    Types with fewer than 1 weight in 20 are left out. Empty if they come from no GGUF file.
    """
    if not (kinds := (getattr(config, ORIGIN, None) or {}).get("tensor_types")):
        return ""
    main = " and ".join(kind for kind, count in kinds.items() if 20 * count >= sum(kinds.values()))
    quantized = any(kind not in FLOATS for kind in main.split(" and "))
    return f"{main} GGUF{f', dequantized to {dtype}' if quantized else ''}"
