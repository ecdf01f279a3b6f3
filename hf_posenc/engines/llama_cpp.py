"""llama.cpp: the keys that its converter makes of a config, its flags, and the table that it computes from both.

`convert_hf_to_gguf.py` (`conversion/base.py`, `TextModel.set_gguf_parameters`) writes for `rope_parameters`:

- default: `rope.freq_base`, as for all;
- linear: `rope.scaling.type` linear, `rope.scaling.factor`;
- yarn: `rope.scaling.type` yarn, `.factor`, `.original_context_length`, `.yarn_attn_factor`, `.yarn_beta_fast`,
  `.yarn_beta_slow`;
- llama3: no key; the tensor `rope_freqs.weight` for Llama's own classes, nothing for others;
- longrope: `rope.scaling.type` longrope; the tensors `rope_factors_long.weight` and `rope_factors_short.weight` for
  Phi-3 and MiniCPM, nothing for others, which then do not scale at all;
- dynamic: nothing.

Some classes write none of these `rope.scaling` keys (Cohere, Phi-3), some not even `rope.freq_base` (Falcon, Gemma);
`patches/engines/llama.cpp.json` lists them. They get their tables from flags.

A context (`src/llama-context.cpp`) then reads `yarn_beta_fast` and `yarn_beta_slow` for a few architectures only. It
overwrites `yarn_attn_factor`, and the flag, wherever YaRN is on; it always multiplies by `rope.scaling.attn_factor`.
A table that its YaRN cannot express is therefore written as `rope_freqs.weight`, the divisor of every pair, and
`rope.scaling.attn_factor`.

The flags: `--rope-freq-base` is theta, `--rope-scale` N divides every frequency by N, with `--rope-scaling yarn` only
the slow ones, from `--yarn-orig-ctx` tokens on; `--yarn-beta-fast` and `--yarn-beta-slow` are the turns of the ramp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.engines import formulas
from hf_posenc.engines.engine import (
    Divisors,
    Draft,
    Engine,
    Setup,
    Source,
    TableError,
    entry_of,
    gguf_architectures,
    known_names,
    open_source,
)
from hf_posenc.engines.formulas import Table
from hf_posenc.errors import PosencError
from hf_posenc.gguf_file import ROPE_TENSORS as GGUF_TENSORS
from hf_posenc.gguf_file import read_header, require_gguf
from hf_posenc.patch.request import MethodLike

_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_ORIGINAL = "original_max_position_embeddings"
_SWITCH = "With -c above {} llama.cpp uses the long list for all texts, else the short one."
Lists = dict[str, Sequence[float]]  # by the names of tensors


class LlamaCpp(Engine):
    """llama.cpp, through a GGUF file."""

    name = "llama.cpp"
    version = "0c1e570 (2026-10-01)"
    fixed_table = True

    def drafts(self, source: Source) -> Iterator[Draft]:
        context, known = ("-c", str(source.reach)), known_names(self.name)
        native = source.forms().get("rope_parameters")
        if native is not None:
            entry = entry_of(native, "full_attention")
            values = {**source.lengths(), "rope_parameters": native}
            notes = _without_converting(entry, source)
            if entry.get("short_factor") != entry.get("long_factor"):
                notes = (*notes, _SWITCH.format(source.original))
            yield Draft("rope_parameters", values, (*context, *_beta_flags(entry)), notes)
            if _architecture(source) in known["without_scaling"]:
                yield Draft("flags", values, (*context, *_table_flags(entry, None)))
        yield from self._tensors(source, context)

    def _tensors(self, source: Source, context: tuple[str, ...]) -> Iterator[Draft]:
        table = source.main_table
        if table is None or table.wrapper is None:
            return
        theta = table.wrapper.specs[table.label].theta
        plain = formulas.plain(theta, table.dim)
        lengths = (source.original, source.original + 1, source.reach)
        in_force = [table.in_force(length) for length in lengths]
        if len({one.factor for one in in_force}) > 1:
            return  # it has one factor for all lengths
        # 1e30 where a pair does not rotate
        lists = (torch.where(one.inv_freq > 0, plain / one.inv_freq, 1e30) for one in in_force)
        short, long, longest = (tuple(divisors.tolist()) for divisors in lists)
        if long != longest:
            return  # nor more than two tables
        divisors = Divisors(short, long, in_force[0].factor, source.original)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if table.label:
            current = getattr(source.text_config, "rope_parameters", None) or {}
            rope = {**current, table.label: rope}
        values = {**source.lengths(), "rope_parameters": rope}
        way = "convert the exported folder, then run this command again with --gguf FILE"
        notes = [f"The table goes into the GGUF file: {way}."]
        if short != long:
            notes.append(_SWITCH.format(source.original))
        yield Draft("tensors", values, context, tuple(notes), divisors)

    def compute(self, setup: Setup) -> Table | str:
        rope, dim, divisors = setup.config["rope_parameters"], setup.table.dim, setup.draft.divisors
        name = _architecture(setup.source)
        if (architecture := gguf_architectures().get(name)) is None:
            return f"its convert_hf_to_gguf has no {name}"
        if setup.table.label == "sliding_attention":  # {arch}.rope.freq_base_swa, never scaled
            return Table(formulas.plain(float(rope["sliding_attention"]["rope_theta"]), dim))
        if "rope_theta" not in entry_of(rope, "full_attention"):
            return "it has no table for the layer types of this model"
        keys, tensors = converted(setup.config, dim, name)
        if divisors is not None:
            if architecture not in divisors.architectures:
                return f"it reads no table from a GGUF file of the architecture {architecture}"
            tensors = dict(divisors.tensors(architecture))
            keys.update(divisors.keys(architecture))
        scaled = {"rope.scaling.factor", "rope.scaling.attn_factor"} & keys.keys()
        if scaled and architecture in known_names("llama.cpp")["own_factor"]:
            return "its class for this model computes a factor of scores of its own from a scaling"
        return runtime(keys, tensors, dim, setup.source.reach, flags=setup.draft.flags)


def converted(config: Mapping[str, Any], dim: int, name: str) -> tuple[dict[str, Any], Lists]:
    """Return the converter's keys for a config, without the architecture's name in front, and its tensors.

    `name` is that of the model's class in transformers.
    """
    known, architecture = known_names("llama.cpp"), gguf_architectures().get(name)
    rope = entry_of(config["rope_parameters"], "full_attention")
    longest = config.get("max_position_embeddings") or config["max_seq_len"]  # DBRX
    keys: dict[str, Any] = {"context_length": longest}
    if name in known["without_base"]:
        return keys, {}
    keys["rope.freq_base"] = theta = float(rope["rope_theta"])
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn") and name not in known["without_scaling"]:
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = kind, float(rope["factor"])
        if kind == "yarn":
            keys["rope.scaling.original_context_length"] = rope[_ORIGINAL]
            for key, sub in (("attention_factor", "attn_factor"), *((b, b) for b in _BETAS)):
                if rope.get(key) is not None:
                    keys[f"rope.scaling.yarn_{sub}"] = float(rope[key])
    tensors: Lists = {}
    if kind == "llama3" and architecture in known["llama3"]:
        ends = rope["low_freq_factor"], rope["high_freq_factor"]
        slowed = formulas.llama3(theta, dim, float(rope["factor"]), *ends, rope[_ORIGINAL])
        tensors[GGUF_TENSORS[0]] = (formulas.plain(theta, dim) / slowed).tolist()
    if kind == "longrope" and architecture in known["longrope"]:
        original = rope[_ORIGINAL]
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = formulas.longrope_factor(longest, original)
        tensors = {GGUF_TENSORS[1]: rope["short_factor"], GGUF_TENSORS[2]: rope["long_factor"]}
    return keys, tensors


def runtime(
    keys: Mapping[str, Any], tensors: Lists, dim: int, context: int, flags: Sequence[str] = ()
) -> Table:
    """Return the table of a context (`-c`, in tokens): `llama_context`, `ggml_rope_yarn_corr_dims`, `rope_yarn`.

    The keys are without the architecture's name in front; `dim` is the rotary dimension.
    """
    options = dict(itertools.pairwise(flags))
    kind = options.get("--rope-scaling", keys.get("rope.scaling.type", "linear"))
    theta = float(options.get("--rope-freq-base", keys.get("rope.freq_base", 10_000.0)))
    scale = 1.0
    if kind != "none":
        scale = float(options.get("--rope-scale", keys.get("rope.scaling.factor") or 1.0))
    trained = keys.get("rope.scaling.original_context_length") or keys["context_length"]
    original = int(options.get("--yarn-orig-ctx", 0) or trained)
    inv_freq = formulas.plain(theta, dim)
    name = f"rope_factors_{'long' if context > original else 'short'}.weight"
    if (divisors := tensors.get("rope_freqs.weight", tensors.get(name))) is not None:  # in float32
        inv_freq = inv_freq / torch.tensor(divisors, dtype=torch.float32).double()
    factor = float(keys.get("rope.scaling.attn_factor", 1.0))
    if kind != "yarn":
        return Table(inv_freq / scale, factor)
    fast, slow = (
        float(options.get(f"--yarn-{beta.replace('_', '-')}", default))
        for beta, default in _BETAS.items()
    )
    turned = formulas.yarn(theta, dim, scale, original, beta_fast=fast, beta_slow=slow)
    ramp = turned / formulas.plain(theta, dim)
    return Table(inv_freq * ramp, factor * (1.0 + 0.1 * math.log(scale) if scale > 1 else 1.0))


def _beta_flags(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of the ramp's ends, which most architectures read from no key."""
    if entry.get("rope_type") != "yarn":
        return ()
    flags: list[str] = []
    for beta, default in _BETAS.items():
        if float(entry.get(beta) or default) != default:
            flags += [f"--yarn-{beta.replace('_', '-')}", _shortest(entry[beta])]
    return tuple(flags)


def _shortest(value: Any) -> str:
    return repr(float(value)).removesuffix(".0")


def _table_flags(entry: Mapping[str, Any], theta: float | None) -> tuple[str, ...]:
    """Return the flags that override the keys of a file, which has the base `theta`, if any."""
    flags: list[str] = []
    if float(entry["rope_theta"]) != theta:
        flags += ["--rope-freq-base", _shortest(entry["rope_theta"])]
    if (kind := entry["rope_type"]) in ("linear", "yarn"):
        flags += ["--rope-scaling", kind, "--rope-scale", _shortest(entry["factor"])]
    if kind == "yarn":
        flags += ["--yarn-orig-ctx", str(entry[_ORIGINAL])]
    return (*flags, *_beta_flags(entry))


def _without_converting(entry: Mapping[str, Any], source: Source) -> tuple[str, ...]:
    """Return a note with the flags for a GGUF file of the same weights without the patch."""
    before = entry_of(source.text_config.rope_parameters, "full_attention")
    if source.patch is None or before.get("rope_type", "default") != "default":
        return ()
    if entry.get("rope_type") not in ("default", "linear", "yarn"):
        return ()
    line = " ".join(("-c", str(source.reach), *_table_flags(entry, float(before["rope_theta"]))))
    return (f"On a GGUF file of the same weights that was converted without the patch: {line}",)


def _architecture(source: Source) -> str:
    names = getattr(source.text_config, "architectures", None) or source.config.architectures
    return str(names[0]) if names else type(source.model).__name__


# Rotary tables in GGUF files: read from a file, compared with a model, and replaced in a copy.


@dataclass(frozen=True)
class GGUFCheck:
    """Comparison of a GGUF file with its model.

    Attributes:
        path: The file.
        architecture: Its `general.architecture`.
        error: Differences between the tables of llama.cpp and of the model.
        divisors: The right table, if a file of this architecture can have one.
    """

    path: str
    architecture: str
    error: TableError
    divisors: Divisors | None

    @property
    def right(self) -> bool:
        """True if llama.cpp computes the same as the model."""
        return self.error.small


def check_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    flags: tuple[str, ...] = (),
    method: MethodLike | None = None,
    **options: Any,
) -> GGUFCheck:
    """Compare the rotary table of a GGUF file with that of the model that it was made from.

    Args:
        file: A file that `convert_hf_to_gguf` made.
        directory: The model, as for `export`.
        flags: The flags that llama.cpp is started with.
        method: As for `export`.
        **options: As for `export`.

    Returns:
        The comparison; `right` if llama.cpp computes the same as the model.

    Raises:
        PosencError: Not a GGUF file, or a model without a table.
    """
    source = open_source(directory, method, **options)
    if (table := source.main_table) is None:
        raise PosencError(
            f"{source.path} has no rotary table that a GGUF file could hold: methods that compute attention, and "
            "tables in the weights, stay with hf_posenc."
        )
    if not isinstance(file, str | Path) or not Path(file).is_file():
        raise PosencError(f"There is no file {file}. Give a GGUF file of convert_hf_to_gguf.")
    header = read_header(file)
    front = f"{header.architecture}."
    keys = {name.removeprefix(front): value for name, value in header.values.items()}
    tensors: Lists = {one: header.divisors(one) for one in GGUF_TENSORS if one in header.tensors}
    computed = runtime(keys, tensors, table.dim, source.reach, flags)
    error = TableError.between(table.label, source.reach, computed, table.in_force(source.reach))
    every = (draft.divisors for draft in LlamaCpp().drafts(source))
    divisors = next((one for one in every if one is not None), None)
    if divisors is not None and header.architecture not in divisors.architectures:
        divisors = None
    return GGUFCheck(str(file), header.architecture, error, divisors)


def write_gguf(check: GGUFCheck, target: str | Path) -> Path:
    """Write a copy of a file with the model's table in it.

    Args:
        check: From `check_gguf`.
        target: The copy; must not exist.

    Returns:
        The path of the copy.

    Raises:
        PosencError: llama.cpp reads no table for this architecture, or the copy exists.
    """
    architecture, divisors = check.architecture, check.divisors
    if divisors is None:
        raise PosencError(
            f"llama.cpp reads no table from a GGUF file of {architecture}, and its own keys cannot express this one."
        )
    gguf, target = require_gguf(), Path(target)
    if target.exists():
        raise PosencError(f"{target} exists. Give another folder with --output, or remove it.")
    import numpy as np

    reader = gguf.GGUFReader(check.path)
    writer: Any = gguf.GGUFWriter(target, architecture, endianess=reader.endianess)
    if (alignment := reader.fields.get(gguf.Keys.General.ALIGNMENT)) is not None:
        writer.data_alignment = alignment.contents()
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        if name.removeprefix(f"{architecture}.").startswith("rope.scaling."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    types = gguf.GGUFValueType
    kinds = {str: types.STRING, float: types.FLOAT32, int: types.UINT32}
    for name, value in divisors.keys(architecture).items():
        writer.add_key_value(f"{architecture}.{name}", value, kinds[type(value)])
    for tensor in reader.tensors:
        if tensor.name not in GGUF_TENSORS:
            own = {"raw_dtype": tensor.tensor_type, "tensor_endianess": reader.endianess}
            writer.add_tensor(tensor.name, tensor.data, **own)
    for name, values in divisors.tensors(architecture).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
