"""Which parameters of a model are trained."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods import available_methods, get_method
from hf_posenc.patching import get_patch
from hf_posenc.resolve import adapter_of, tables_of, unwrap
from hf_posenc.seams.parameters import trained_parameters
from hf_posenc.seams.sincos import SinCosTable
from hf_posenc.training.adapters import lora_config, require_peft

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
    tables = [
        table for table in tables_of(model, adapter_of(model)) if isinstance(table, SinCosTable)
    ]
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
