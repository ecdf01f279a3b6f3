"""Which parameters of a model are trained."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods import available_methods, get_method
from hf_posenc.model.discovery import SinCosTable, tables_of
from hf_posenc.model.parameters import PARAMETERS, trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.patching import get_patch
from hf_posenc.saving import patch_to_save

if TYPE_CHECKING:
    from peft import LoraConfig


# LoRA for a model's attention, with its embeddings and norms trained whole.


_ATTENTION = re.compile(r"(Attention|MLA)\d*$")
"""The names of attention classes, but not of layers around them (`Zamba2AttentionDecoderLayer`)."""
_UNTRAINED = re.compile(r"(Indexer|Compressor)$|Cross")
"""The names of what gets no gradient from a text: what chooses keys for attention, and what looks at images."""

_EXPERTS_NAMES = (".gate_proj", ".up_proj", ".down_proj")
"""What PEFT takes for parts of the experts where these are fused, whatever module it is (Afmoe's gated attention)."""

_PEFTS_HEAD = "lm_head"
"""PEFT ties what is trained of head and embeddings where one of the names is this, be there such a module or not."""


def lora_config(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
    modules_to_save: Sequence[str] | None = None,
    **options: Any,
) -> LoraConfig:
    """PEFT's configuration of a LoRA for longer contexts; that of a patched model carries the patch.

    By default every linear map of the decoder's attention gets a LoRA, and the input embeddings and the norms are
    trained whole beside it: a LoRA alone hardly learns a longer context (LongLoRA, Chen et al. 2023, arXiv 2309.12307,
    table 2). What the patch itself trains is trained too, and saved with the adapter.

    Args:
        model: The model, patched or not.
        rank: The rank r.
        alpha: The scale, as in `alpha / r`.
        dropout: Probability of leaving out an input of the LoRA.
        target_modules: Which modules get a LoRA instead, by path or by the end of it.
        modules_to_save: Which modules are trained whole instead, likewise; `[]`: none.
        **options: Of `peft.LoraConfig`: `use_dora`, `use_rslora`, `init_lora_weights`, ...

    Raises:
        PosencError: peft is not installed, the model has an adapter, no attention is found in it, or its patch is a
            method of the user's own, which no name finds again.
    """
    require_peft()
    from peft import LoraConfig

    from hf_posenc.lora import PosencLoraConfig

    whole: Any = model
    if hasattr(model, "peft_config"):
        raise PosencError(
            "This model has an adapter already. Merge it first (merge_and_unload()); another one beside it takes a "
            "copy of its configuration."
        )
    decoder = _decoder(model)
    embeddings, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    tieable = type(head) is nn.Linear and head.bias is None
    if target_modules is None:
        target_modules = short_names(model, attention_projections(decoder))
        if not target_modules:
            raise PosencError(
                f"In the attention of {type(model).__name__} no linear map was found that is not shared between "
                "layers. Name the modules that get a LoRA (target_modules=[...]), or take train='full'."
            )
    if modules_to_save is None:
        kept = norms(decoder)
        if tied and not tieable:
            warnings.warn(
                f"The embeddings of {type(model).__name__} stay as they are: its head shares them, and PEFT can train "
                "both as one only where the head is a linear map without a bias.",
                stacklevel=3,
            )
        else:
            kept = [embeddings, *([head] if tied else []), *kept]
        modules_to_save = short_names(model, kept)
        if tied and tieable and _PEFTS_HEAD not in modules_to_save:
            modules_to_save = [_PEFTS_HEAD, *modules_to_save]
    if trained_parameters(model):
        modules_to_save = [*modules_to_save, PARAMETERS]
    values: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": list(target_modules),
        "modules_to_save": list(modules_to_save) or None,
        "ensure_weight_tying": tied and _names(embeddings, model, modules_to_save),
        "task_type": "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        **options,
    }
    patch = patch_to_save(model)
    if patch is None:
        return LoraConfig(**values)
    return PosencLoraConfig(**values, hf_posenc=patch.to_dict())


def attention_projections(decoder: nn.Module) -> list[nn.Module]:
    """Every linear map inside the attention of a decoder that an adapter can be added to and merged into."""
    fused = any(path.endswith("gate_up_proj") for path, _ in decoder.named_parameters())
    taken = _shared(decoder) | {
        id(module)
        for path, module in decoder.named_modules()
        if fused and path.endswith(_EXPERTS_NAMES)
    }
    return [
        module
        for attention in _own_modules(decoder)
        if _ATTENTION.search(type(attention).__name__)
        for module in _own_modules(attention)
        if _is_linear(module) and id(module) not in taken
    ]


def norms(decoder: nn.Module) -> list[nn.Module]:
    """Every norm of a decoder that has weights of its own."""
    shared = _shared(decoder)
    return [
        module
        for module in _own_modules(decoder)
        if "Norm" in type(module).__name__
        and list(module.parameters(recurse=False))
        and id(module) not in shared
    ]


def short_names(model: nn.Module, modules: Collection[nn.Module]) -> list[str]:
    """The names of modules as PEFT matches them: of each path the shortest end that means these modules alone.

    A module without such a name is left out (a norm at the top of a model without a head, where others are named so).
    """
    wanted = {id(module) for module in modules}
    every = [(path, id(module)) for path, module in model.named_modules(remove_duplicate=False)]

    @functools.cache
    def alone(end: str) -> bool:
        # `modules_to_save` matches any end of a path, also in the middle of a name ("norm": "input_layernorm").
        return not end[0].isdigit() and all(
            key in wanted for path, key in every if path.endswith(end)
        )

    names: dict[str, None] = {}
    for path in (path for path, key in every if key in wanted):
        parts = path.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        shortest = next(filter(alone, ends), None)
        if shortest is not None:
            names[shortest] = None
    return list(names)


def require_peft() -> None:
    """Says how to get PEFT.

    Raises:
        PosencError: It is not installed.
    """
    if find_spec("peft") is None:
        raise PosencError("LoRA needs the peft library: pip install 'hf-posenc[train]'.")


def _decoder(model: nn.Module) -> nn.Module:
    """The innermost transformers model around the rotary modules: the text decoder, without a vision tower."""
    from transformers import PreTrainedModel

    table = tables_of(model)[0]
    around = [
        module
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and (not path or table.name.startswith(f"{path}."))
    ]
    return around[-1]


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all inside it that a text trains: no vision tower, and nothing that only chooses keys."""
    from transformers import PreTrainedModel

    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) and not _UNTRAINED.search(type(child).__name__):
            yield from _own_modules(child)


def _shared(decoder: nn.Module) -> set[int]:
    """Modules that share a weight with another (Zamba 2): an adapter of one would be merged into all of them."""
    holders: dict[int, list[int]] = {}
    for module in decoder.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(id(module))
    return {module for modules in holders.values() if len(modules) > 1 for module in modules}


def _is_linear(module: nn.Module) -> bool:
    """Also a quantized layer, whose weight is packed, and GPT-2's transposed one; not DeepSeek V4's grouped one."""
    if "Grouped" in type(module).__name__:
        return False
    sizes = (("in_features", "out_features"), ("nx", "nf"))
    return any(all(isinstance(getattr(module, n, None), int) for n in names) for names in sizes)


def _names(module: nn.Module, model: nn.Module, names: Collection[str]) -> bool:
    paths = [path for path, found in model.named_modules() if found is module]
    return any(path.endswith(name) for path in paths for name in names)


Trained = Literal["full", "lora", "encoding"]


def choose_parameters(
    model: nn.Module,
    train: Trained = "full",
    *,
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    **lora_options: Any,
) -> nn.Module:
    """Chooses what of a patched model is trained, by `requires_grad` or by an adapter.

    Args:
        model: A transformers model, patched or not, before Trainer, Accelerator or torch.compile wrap it.
        train: `"full"`: all weights, those of the encoding among them. `"lora"`: a LoRA on attention, with embeddings,
            norms and the encoding's own parameters whole (`lora_config`). `"encoding"`: the encoding's own parameters
            alone.
        lora_rank: The rank of the LoRA.
        lora_alpha: Its scale, as in `alpha / rank`.
        lora_dropout: Probability of leaving out an input of the LoRA.
        **lora_options: For `lora_config`: `target_modules`, `modules_to_save`, `use_dora`, ...

    Returns:
        The same model, in train mode or not as it was; for `"lora"` a `PeftModel` around it, whose adapter carries the
        patch.

    Raises:
        PosencError: A model that is wrapped or has an adapter already, or an encoding that trains nothing of its own.
    """
    if train not in get_args(Trained):
        raise unknown("choice of parameters", str(train), get_args(Trained))
    if unwrap(model) is not model:
        raise PosencError(
            f"This model is wrapped by {type(model).__name__} already. Choose what is trained before a model is "
            "wrapped, and merge an adapter first: merge_and_unload(), or `hf-posenc export DIR --to transformers5`."
        )
    if train != "lora":
        if lora_options:
            raise PosencError(
                f"{', '.join(lora_options)} belong to train='lora', not to {train!r}."
            )
        chosen = _every_weight(model) if train == "full" else _of_encoding(model)
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        return model
    if lora_rank < 1 or not 0 <= lora_dropout < 1:
        raise PosencError(
            f"lora_rank={lora_rank}, lora_dropout={lora_dropout:g}: a rank is at least 1, a dropout from 0 to below 1."
        )
    require_peft()
    from peft import get_peft_model

    config = lora_config(
        model, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout, **lora_options
    )
    found: nn.Module = get_peft_model(model, config)
    return found


def _every_weight(model: nn.Module) -> set[int]:
    if getattr(model, "is_quantized", False):
        raise PosencError(
            "The weights of this model are quantized and cannot be trained themselves. Take train='lora', or load it "
            "without quantization."
        )
    tables = [table for table in tables_of(model) if isinstance(table, SinCosTable)]
    constant = {id(table.tensor()) for table in tables}  # RoFormer keeps its sines as a weight
    return {id(p) for p in model.parameters() if p.is_floating_point() and id(p) not in constant}


def _of_encoding(model: nn.Module) -> set[int]:
    trained = trained_parameters(model)
    if not trained:
        patch = get_patch(model)
        there = (
            "This model is not patched" if patch is None else f"{patch.method} has no parameters"
        )
        able = [name for name in available_methods() if get_method(name).trainable]
        raise PosencError(
            f"{there}, so there is nothing for train='encoding'. Patch it with one of {', '.join(able)}, or take "
            "train='full' or 'lora'."
        )
    return {id(parameter) for parameter in trained.values()}
