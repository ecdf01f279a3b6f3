"""The parameters that are trained: all, the encoding's own, or a LoRA on attention with whole embeddings and norms."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import PosencError, one_line, unknown
from hf_posenc.evaluation.scoring.estimate import linear_features
from hf_posenc.methods import available_methods, get_method
from hf_posenc.model.discovery import NoRotaryError, SinCosTable, tables_of
from hf_posenc.model.parameters import PARAMETERS, trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch.files import patch_to_save
from hf_posenc.patch.patching import get_patch
from hf_posenc.seams.inspection import is_formula
from hf_posenc.training.options import Trained

if TYPE_CHECKING:
    from peft import LoraConfig

_PADDING = 4  # rows before those of a table of sines, at most

_ATTENTION = re.compile(r"(Attention|MLA)\d*$")
"""Names of attention classes, but not of layers around them (`Zamba2AttentionDecoderLayer`)."""
_UNTRAINED = re.compile(r"(Indexer|Compressor)$|Cross")
"""Names of modules without a gradient from text: selection of keys for attention, and attention to images."""
_EXPERTS_NAMES = (".gate_proj", ".up_proj", ".down_proj")
"""Names that PEFT takes for parts of fused experts, whatever module it is (Afmoe's gated attention)."""
_PEFTS_HEAD = "tied.lm_head"
"""PEFT ties the trained copies of head and embeddings if a name ends so. It would not save that of a module."""


def choose_parameters(
    model: nn.Module,
    train: Trained = "full",
    *,
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    **options: Any,
) -> nn.Module:
    """Choose the trained parameters of a patched model, by `requires_grad` or by an adapter.

    Args:
        model: A transformers model, patched or not, before Trainer, Accelerator or torch.compile wrap it.
        train: `"full"`: all weights, those of the encoding among them. `"lora"`: a LoRA on attention, with whole
            embeddings, norms and parameters of the encoding (`lora_config`). `"encoding"`: the encoding's own
            parameters alone.
        lora_rank: The rank of the LoRA.
        lora_alpha: Its scale, as in `alpha / rank`.
        lora_dropout: Dropout probability of the LoRA's inputs.
        **options: For `lora_config`: `target_modules`, `modules_to_save`, `use_dora`, ...

    Returns:
        The same model, in its previous mode; for `"lora"` a `PeftModel` around it, whose adapter carries the patch.

    Raises:
        PosencError: A wrapped model, one with an adapter, or an encoding without parameters.

    Examples:
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import choose_parameters
        >>> model = choose_parameters(patch_model(model, "kerple_log"), "encoding")
        >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        16
    """
    if train not in get_args(Trained):
        raise unknown("choice of parameters", str(train), get_args(Trained))
    refuse_wrapped(model, "Choose the trained parameters")
    if train != "lora" and options:
        raise PosencError(f"{', '.join(options)} belong to train='lora', not to {train!r}.")
    if train == "lora":
        options = {"rank": lora_rank, "alpha": lora_alpha, "dropout": lora_dropout, **options}
        config = lora_config(model, **options)
        from peft import get_peft_model

        try:
            adapted: nn.Module = get_peft_model(model, config)
        except ValueError as error:  # no such rank, or modules that no LoRA can be added to
            raise PosencError(f"The LoRA cannot be added: {one_line(error)}") from error
        return adapted if model.training else adapted.eval()
    if train == "full" and getattr(model, "is_quantized", False):
        raise PosencError(
            "The weights of this model are quantized and cannot be trained. Use train='lora', or load it unquantized."
        )
    own = trained_parameters(model)
    if train == "encoding" and not own:
        patch = get_patch(model)
        reason = f"{patch.method} has no parameters" if patch else "This model is not patched"
        able = [name for name in available_methods() if get_method(name).trainable]
        raise PosencError(
            f"{reason}, so train='encoding' has nothing to train. Patch the model with one of {', '.join(able)}, or "
            "use train='full' or 'lora'."
        )
    chosen = {id(w) for w in (own.values() if train == "encoding" else model.parameters())}
    constant = {id(tensor) for tensor in _formulas(model)}
    for weight in model.parameters():
        trains = weight.is_floating_point() and id(weight) not in constant
        weight.requires_grad_(trains and id(weight) in chosen)
    return model


def refuse_wrapped(model: nn.Module, task: str) -> None:
    """Raise for a model that is wrapped or has an adapter, which the task must come before."""
    wrapped = unwrap(model) is not model
    if wrapped or hasattr(model, "peft_config"):
        state = f"is wrapped by {type(model).__name__}" if wrapped else "has an adapter"
        raise PosencError(
            f"This model {state} already. {task} before a model is wrapped, and merge an adapter first: "
            "merge_and_unload(), or `hf-posenc export DIR --to transformers5`."
        )


def _formulas(model: nn.Module) -> list[Tensor]:
    """Return the sines and cosines that a model keeps among its weights (RoFormer, Marian)."""
    try:
        tables = tables_of(model)
    except NoRotaryError:
        embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
        # The first rows may be those of padding.
        return [each.weight for each in embeddings if is_formula(each.weight, start=_PADDING)]
    return [table.tensor() for table in tables if isinstance(table, SinCosTable)]


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
    """Return PEFT's configuration of a LoRA for longer contexts; that of a patched model carries the patch.

    By default every linear map of the decoder's attention gets a LoRA, and the input embeddings and the norms are
    trained whole beside it: a LoRA alone hardly learns a longer context (LongLoRA, Chen et al. 2023, arXiv 2309.12307,
    table 2). The patch's own parameters are trained too, and saved with the adapter.

    Args:
        model: The model, patched or not.
        rank: The rank r.
        alpha: The scale, as in `alpha / r`.
        dropout: Dropout probability of the LoRA's inputs.
        target_modules: Modules that get a LoRA instead, by path or by the end of it.
        modules_to_save: Modules that are trained whole instead, likewise; `[]`: none.
        **options: Of `peft.LoraConfig`: `use_dora`, `use_rslora`, `init_lora_weights`, ...

    Returns:
        The configuration for `peft.get_peft_model`, of the kind for causal language models.

    Raises:
        PosencError: peft is not installed, no attention is found in the model, or its patch is a user-defined method,
            which is not registered by name.

    Examples:
        >>> from peft import get_peft_model
        >>> from hf_posenc import patch_model
        >>> from hf_posenc.training import lora_config
        >>> config = lora_config(patch_model(model, "yarn", scale=4), rank=8)
        >>> type(get_peft_model(model, config)).__name__
        'PeftModelForCausalLM'
    """
    if find_spec("peft") is None:
        raise PosencError("LoRA needs the peft library: pip install 'hf-posenc[train]'.")
    from peft import LoraConfig

    from hf_posenc.patch.lora import PosencLoraConfig

    whole: Any = model
    if hasattr(model, "peft_config"):
        raise PosencError(
            "This model has an adapter already. Merge it (merge_and_unload()), or add a copy of its configuration."
        )
    decoder = _text_decoder(model)
    embeddings, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    tieable = type(head) is nn.Linear and head.bias is None
    if target_modules is None:
        target_modules = short_names(model, _attention_projections(decoder))
        if not target_modules:
            raise PosencError(
                f"The attention of {type(model).__name__} has no linear map that is not shared between layers. Name "
                "the modules that get a LoRA (target_modules=[...]), or use train='full'."
            )
    if modules_to_save is None:
        shared = _shared(decoder)
        norms = (each for each in _text_modules(decoder) if "Norm" in type(each).__name__)
        kept = [n for n in norms if [*n.parameters(recurse=False)] and id(n) not in shared]
        if tied and not tieable:
            warnings.warn(
                f"The embeddings of {type(model).__name__} stay frozen: its head shares them, and PEFT can train both "
                "as one only if the head is a linear map without a bias.",
                stacklevel=3,
            )
        else:
            kept = [embeddings, *([head] if tied else []), *kept]
        modules_to_save = short_names(model, kept)
    trained = [modules_to_save] if isinstance(modules_to_save, str) else [*modules_to_save]
    trained += [PARAMETERS] if trained_parameters(model) else []
    paths = dict(model.named_modules())
    if absent := [name for name in trained if not any(path.endswith(name) for path in paths)]:
        raise PosencError(f"modules_to_save names {absent[0]!r}, and no module is called so.")
    suffixes = tuple(trained)
    ties = tied and any(paths[path] is embeddings for path in paths if path.endswith(suffixes))
    values: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        # A text is a regular expression, as for PEFT.
        "target_modules": target_modules if isinstance(target_modules, str) else [*target_modules],
        "modules_to_save": [*trained, *[_PEFTS_HEAD] * (ties and tieable)] or None,
        "ensure_weight_tying": ties,
        "task_type": "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        **options,
    }
    patch = patch_to_save(model)
    try:
        if patch is None:
            return LoraConfig(**values)
        return PosencLoraConfig(**values, hf_posenc=patch.to_dict())
    except TypeError as error:
        raise PosencError(f"peft.LoraConfig does not take these options: {error}") from error


def _attention_projections(decoder: nn.Module) -> list[nn.Module]:
    """Return the linear maps inside a decoder's attention that an adapter can be added to and merged into."""
    excluded = _shared(decoder)
    if any(path.endswith("gate_up_proj") for path, _ in decoder.named_parameters()):
        modules = decoder.named_modules()
        excluded |= {id(module) for path, module in modules if path.endswith(_EXPERTS_NAMES)}
    return [
        module
        for attention in _text_modules(decoder)
        if _ATTENTION.search(type(attention).__name__)
        for module in _text_modules(attention)
        if linear_features(module) is not None
        # grouped layers multiply each part of the features by a matrix of its own
        and "Grouped" not in type(module).__name__
        and id(module) not in excluded
    ]


def short_names(model: nn.Module, modules: Collection[nn.Module]) -> list[str]:
    """Return names as PEFT matches them: for each path the shortest suffix that matches only these modules.

    A module without such a name is left out (a norm at the top of a model without a head, if others have its name).
    """
    keys = {id(module) for module in modules}
    every = [(path, id(module)) for path, module in model.named_modules(remove_duplicate=False)]

    @functools.cache
    def is_unique(end: str) -> bool:
        # `modules_to_save` matches any end of a path, also in the middle of a name ("norm": "input_layernorm").
        return not end[0].isdigit() and all(key in keys for at, key in every if at.endswith(end))

    names: dict[str, None] = {}
    for path in (path for path, key in every if key in keys):
        parts = path.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        if (shortest := next(filter(is_unique, suffixes), None)) is not None:
            names[shortest] = None
    return list(names)


def _text_decoder(model: Any) -> nn.Module:
    """Return the innermost transformers model around the rotary modules, or the embeddings, without a vision tower."""
    models = [(p, each) for p, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    try:
        table = tables_of(model)[0]
    except NoRotaryError:
        inner = [each for _, each in models if model.get_input_embeddings() in {*each.modules()}]
        return inner[-1] if inner else unwrap(model)
    return [each for path, each in models if not path or table.name.startswith(f"{path}.")][-1]


def _text_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and the modules inside it that get a gradient from text, without a vision tower."""
    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) and not _UNTRAINED.search(type(child).__name__):
            yield from _text_modules(child)


def _shared(decoder: nn.Module) -> set[int]:
    """Return modules that share a weight (Zamba 2): an adapter of one would be merged into all of them."""
    holders: dict[int, list[int]] = {}
    for module in decoder.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(id(module))
    return {module for modules in holders.values() if len(modules) > 1 for module in modules}
