"""The changes that a patch makes in a live model, and the record that undoes them.

Tensors are replaced at every module that holds them, and a module's forward may be shown others in their place.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError
from hf_posenc.model.discovery import SinCosTable
from hf_posenc.model.forward import cache_of, text_of
from hf_posenc.model.parameters import PARAMETERS
from hf_posenc.model.sampled import Sample

ABSENT = "<absent>"
"""The value from before of an attribute that was not there."""
Edits = Sequence[tuple[Any, dict[str, Any]]]
"""Configs with the values that a patch gives them."""


@dataclass(eq=False)
class Held:
    """A tensor at every module that holds it, by the very same object."""

    places: tuple[tuple[nn.Module, str], ...]

    def tensor(self) -> Tensor:
        """Return the tensor in force."""
        module, name = self.places[0]
        tensor: Tensor = getattr(module, name)
        return tensor

    def swap(self, tensor: Tensor) -> None:
        """Replace the tensor; device and dtype stay, and so does whether it is a parameter."""
        old = self.tensor()
        new = tensor.to(old.device, old.dtype)
        if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for module, name in self.places:
            setattr(module, name, new)


def held(model: nn.Module, tensor: str | Tensor) -> Held:
    """Return a tensor of a model, given itself or by its path, at every module that holds it."""
    if isinstance(tensor, str):
        outer, _, name = tensor.rpartition(".")
        tensor = getattr(model.get_submodule(outer), name)
    places = (
        (module, key)
        for module in model.modules()
        for own in (module._parameters, module._buffers)
        for key, value in own.items()
        if value is tensor
    )
    return Held(tuple(places))


def write(target: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set attributes of a config or module and return their old values, for `restore`."""
    mapping = getattr(target, "attribute_map", {})
    before: dict[str, Any] = {}
    for key, value in values.items():
        key = mapping.get(key, key)
        before[key] = copy.deepcopy(vars(target).get(key, ABSENT))
        # Not by setattr: `rope_scaling` is a property of configs that would replace the whole block.
        vars(target)[key] = copy.deepcopy(value)
    return before


def restore(target: Any, before: Mapping[str, Any]) -> None:
    """Undo `write`."""
    for key, value in before.items():
        if isinstance(value, str) and value == ABSENT:
            vars(target).pop(key, None)
        else:
            vars(target)[key] = copy.deepcopy(value)


@dataclass(kw_only=True)
class Record:
    """All that a patch has changed, which `undo` reverts; kept in the model, so that a copy carries its own."""

    original: int  # the original context length, in tokens; 0 if the model has none
    extended: int | None  # the one that the patch reaches; `None` where it follows the text
    export: str | None = None  # the form in which plain transformers computes it, as in `Patch`
    # Every config and module with attributes that were set, and their values from before.
    changes: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    # The tables that were swapped, and their tensors from before.
    tensors: list[tuple[Held | SinCosTable, Tensor]] = field(default_factory=list)
    # What is taken out again by its `remove`: forwards that were replaced, and hooks.
    hooks: list[Any] = field(default_factory=list)
    # The blocks on which the patch is tried.
    sample: Sample = field(default_factory=lambda: Sample({}))

    def set(self, target: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Set attributes of a config or module, and return their values from before."""
        before = write(target, values)
        self.changes.append((target, before))
        return before

    def swap(self, place: Held | SinCosTable, tensor: Tensor) -> None:
        """Replace a tensor."""
        self.tensors.append((place, place.tensor()))
        place.swap(tensor)

    def write_config(self, model: nn.Module, edits: Edits) -> None:
        """Write to configs, and to the outermost one the block that `from_pretrained` reads."""
        raise NotImplementedError

    def undo(self) -> None:
        """Restore everything."""
        for place, tensor in self.tensors:
            place.swap(tensor)
        for hook in self.hooks:
            hook.remove()
        for target, before in reversed(self.changes):
            restore(target, before)


def length_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of a forward's longer text, padding included, and of its cache; `None` if it gets no text."""
    texts = text_of(args, kwargs), *map(kwargs.get, ("decoder_input_ids", "decoder_inputs_embeds"))
    source, *targets = (0 if x is None or x.dim() < 2 else x.shape[1] for x in texts)
    target, count = max(targets), getattr(cache_of(kwargs), "get_seq_length", None)
    cached = 0 if count is None else int(count())
    if target:
        return max((source, 0), (target, cached), key=sum)
    if "lengths" in kwargs:  # of whole texts: XLM gets what is in its cache again, and cuts it off
        source -= cached
    return (source, cached) if source else None


@dataclass(frozen=True)
class TableEnd:
    """A hook in front of a forward that refuses more tokens than its tables have positions for."""

    positions: int

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = 0 if torch.compiler.is_compiling() else sum(length_of(args, kwargs) or ())
        if tokens <= self.positions:
            return
        mask: Any = kwargs.get("attention_mask")
        rows = tokens_of_rows(mask)
        # The mask of an encoder does not describe its decoder's text.
        longest = max(rows) if rows is not None and mask.shape[1] == tokens else tokens
        if self._skips_padding(model, kwargs) and (tokens := longest) <= self.positions:
            return
        way = "Patch"
        if longest <= self.positions:
            way = f"Padding takes positions too: pad to at most {self.positions:,} tokens, or patch"
        raise PosencError(
            f"{tokens:,} tokens: the patched tables of {type(model).__name__} have {self.positions:,} positions. "
            f"{way} it with a target_length of at least {tokens:,}."
        )

    def _skips_padding(self, model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a text that is padded past the table reads it as it does alone."""
        modules = [*model.modules()]
        if any(hasattr(each, "make_weights") or hasattr(each, "make_weight") for each in modules):
            return False  # past its end, whatever the mask, the class writes a table of its own
        # Positions are given, or counted from the mask (OPT) or from the tokens that are no padding (RoBERTa).
        return kwargs.get("position_ids") is not None or any(
            "attention_mask" in inspect.signature(type(each).forward).parameters
            or each.padding_idx == len(each.weight) - self.positions - 1
            for each in modules
            if isinstance(each, nn.Embedding)
        )


def tokens_of_rows(mask: Any) -> list[int] | None:
    """Return the tokens in each row of a padded batch; `None` without a mask of shape (batch, tokens)."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    rows: list[int] = mask.ne(0).sum(1).tolist()
    return rows or None


class Replaced:
    """A forward that stands in for that of a module's class, as an attribute of the module.

    So it survives a copy, and is called inside of accelerate's hooks, which keep the forward from before in another
    attribute.
    """

    _slots = "forward", "_old_forward"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.earlier: Any = None

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of the forward from before."""
        own = types.MethodType(type(self.module).forward, self.module)
        return inspect.signature(self.earlier or own)

    def install(self) -> Replaced:
        """Replace the forward, until `remove`; return the new one."""
        own = vars(self.module)
        slot = self._slots["_hf_hook" in own and "_old_forward" in own]
        self.earlier, own[slot] = own.get(slot), self
        return self

    def remove(self) -> None:
        """Restore the module."""
        own = vars(self.module)
        for slot in self._slots:
            later = own.get(slot)
            while isinstance(later, Replaced) and later is not self:  # removed in another order
                if later.earlier is self:
                    later.earlier = self.earlier
                later = later.earlier
            if own.get(slot) is not self:
                continue
            if self.earlier is not None:
                own[slot] = self.earlier
            elif slot == "forward":
                del own[slot]
            else:  # hooks came after the patch
                own[slot] = types.MethodType(type(self.module).forward, self.module)

    def native(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the code from before on the module or a view of it."""
        earlier = self.earlier
        if earlier is None:
            return type(self.module).forward(module, *args, **kwargs)
        if getattr(earlier, "__self__", None) is self.module:
            return earlier.__func__(module, *args, **kwargs)
        if isinstance(earlier, Replaced) and module is not self.module:
            own: Any = copy.copy(earlier)
            own.module = module
            return own(*args, **kwargs)
        if module is not self.module:
            raise PosencError(
                f"The forward of {type(self.module).__name__} was replaced before the patch by {earlier!r}, which "
                "cannot read another table. Call unpatch_model(model), and take it out first."
            )
        return earlier(*args, **kwargs)

    def seen_as(self, others: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run the code from before on a view of the module that has other attributes, and shares all else with it.

        So no other forward sees them. What the code writes to attributes of the module does not reach it, but for new
        ones, as those by which transformers knows that its hooks are there.
        """
        if not others:
            return self.native(self.module, *args, **kwargs)
        own = vars(self.module)
        view = object.__new__(type(self.module))
        separate = {name: dict(own[name]) for name in ("_parameters", "_buffers")}
        view.__dict__.update({**own, **separate, **others})
        output = self.native(view, *args, **kwargs)
        for name in vars(view).keys() - own.keys() - others.keys():
            own[name] = vars(view)[name]
        return output


def refuse_replica(model: nn.Module, args: Any) -> None:
    """Refuse a replica of DataParallel, in which replaced code reads weights of the model itself: a pre-hook."""
    if getattr(model, "_is_replica", False) and any(
        hasattr(module, PARAMETERS)
        or any(isinstance(own, Replaced) for own in vars(module).values())
        for module in model.modules()
    ):
        raise PosencError(
            f"torch.nn.DataParallel does not run this patch of {type(model).__name__}, whose layers read weights by "
            "the model that was patched, and not by its replicas. Start a process for each device instead (accelerate "
            "launch, torchrun: DistributedDataParallel), or show one device to this process (CUDA_VISIBLE_DEVICES=0)."
        )


class ShownTable(Replaced):
    """The forward of a module that holds a table, to which another tensor is shown in its place; the table stays."""

    texts: tuple[Any, ...] = ()  # hooks of the model that decide on the tensor

    def __init__(self, module: nn.Module, name: str, start: int) -> None:
        super().__init__(module)
        self.name, self.start = name, start  # of the table, and its row of position 0
        # A copy of the table, and what was made of it.
        self._made: tuple[Tensor, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own code."""
        tensor = self.tensor(getattr(self.module, self.name))
        return self.seen_as({} if tensor is None else {self.name: tensor}, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownTable:
        """Return a copy for that of the module; if its model is not copied (PEFT), hooks of the model are the same."""
        for each in self.texts:
            memo.setdefault(id(each), each)
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__getstate__(), memo)
        return copied

    def tensor(self, table: Tensor) -> Tensor | None:
        """Return the tensor that is shown for a table; `None`: the table itself."""
        raise NotImplementedError

    def made(self, table: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is made of the table; the last one if the table has the same values.

        Its version does not tell: what is written to `.data` leaves it as it was.
        """
        if torch.compiler.is_compiling() or table.is_inference() or table.is_meta:
            return make(table.detach())
        made, kind = self._made, (table.dtype, table.device)  # read once, for the threads
        if made is None or (made[0].dtype, made[0].device) != kind or not made[0].equal(table):
            with torch.inference_mode(False), torch.no_grad():
                self._made = made = table.detach().clone(), make(table.detach())
        return made[1]
