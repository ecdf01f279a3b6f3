"""Experiments on a live model with a few tokens that show whether order matters to it, and in which modules.

No model family is known by name. Attention without positions is a function of a set, which these experiments test:

- *One token repeated.* Attention over equal values returns that value, whatever its weights. Rows of the output that
  differ were given something by position: an absolute encoding, a count of the keys, or a state.
- *A context in another order.* Each block, and each module in it, is called again with all rows but the last permuted.
  A last row that moves shows a relative encoding, or another way to read order.
- *Positions far away.* `position_ids` that start later change nothing once all encodings are silenced, unless a module
  reads positions for something else, such as a factor on queries.
- *A set twice.* Three rows, and the same three in another order after them, are put in front of every module. Attention
  averages over a set, and over twice that set alike, so the last rows of both are equal. One forward answers for all
  modules, and rounding does not add up from one to the next.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import LOAD_FIRST, UnsupportedModelError, one_line
from hf_posenc.model.unwrapping import hooked, trial
from hf_posenc.model.weights import execution_device, is_offloaded, is_quantized

TOKENS = 7
"""Length of the texts that a model is tried on: shorter than the windows of models built for tests."""
FAR_ROWS = 3
"""The first rows of such a text, which a convolution over four tokens does not read from the last row."""
_TWICE = (0, 1, 2, 1, 0, 2, 0)  # a set of rows twice, and one row that fills the text
_LAST = (2, 5)  # the last rows of both
_SHIFT = 1 << 20  # past the length at which any model begins to scale queries
_OUTPUTS = ("logits", "last_hidden_state", "encoder_last_hidden_state", "prediction_logits")


def tolerance(model: nn.Module) -> float:
    """Return the relative difference up to which two results are equal: rounding of the model's dtype."""
    return max(2e-5, 8 * _rounding(model))


def sharp_tolerance(model: nn.Module) -> float:
    """Return the relative difference up to which two rows are equal that one module has made from equal ones."""
    return max(2e-5, 2 * _rounding(model))


def _rounding(model: nn.Module) -> float:
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if first.dtype == torch.float32 and first.is_cuda:
        factor = torch.full((64, 64), 1 + 2**-12, device=first.device)
        if float((factor @ factor)[0, 0]) == len(factor):  # TF32 has rounded the factors to 1
            return 2.0**-10
    if is_quantized(model):  # a code of 8 bits is as exact as the largest number of its row is
        return 2.0**-5
    return float(torch.finfo(first.dtype).eps)


def ordinary_tokens(model: Any, count: int, seed: int = 0) -> Tensor:
    """Return different token ids that no config names as special, shape (1, count), on the device of the model."""
    special = {0, 1, 2, 3}  # by custom, also where the config does not say so
    for module in model.modules():
        for key, value in vars(vars(module).get("config") or object).items():
            if "token_i" in key and isinstance(value, int):
                special.add(value)
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if not isinstance(size, int):
        with contextlib.suppress(NotImplementedError):
            size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if not isinstance(size, int):
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} reads no tokens. hf_posenc patches positions of text.")
    usable = sorted({*range(min(size, 4 * (count + len(special)) + 100))} - special)
    return torch.tensor([random.Random(seed).sample(usable, count)], device=_device(model))


def _device(model: nn.Module) -> torch.device:
    device = execution_device(model)
    if device.type == "meta":
        raise UnsupportedModelError(
            f"{type(model).__name__} is on the meta device, without weights. {LOAD_FIRST}"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and is_offloaded(module):
            raise UnsupportedModelError(
                f"The weights of {path} are offloaded, and whether they are positions is found by reading them. Keep "
                f"the embeddings of {type(model).__name__} on a device (device_map), or patch it before accelerate "
                "offloads them."
            )
    return device


def forward(model: Any, ids: Tensor, **arguments: Any) -> list[Tensor]:
    """Run a model without a cache and return its outputs for each token, in float64, shape (1, tokens, features).

    An encoder-decoder gets the same tokens on both sides. A model whose head has no output for each token, as that of a
    classifier, is run without its head. One that does not run on tokens alone is refused.
    """
    try:
        return _forward(model, ids, arguments)
    except UnsupportedModelError:
        body = getattr(model, "base_model", model)
        with contextlib.suppress(UnsupportedModelError):  # the reason of the whole model is given
            if body is not model:
                return _forward(body, ids, arguments)
        raise


def _forward(model: Any, ids: Tensor, arguments: Mapping[str, Any]) -> list[Tensor]:
    known = inspect.signature(model.forward).parameters
    arguments = {"input_ids": ids, **arguments}
    if "decoder_input_ids" in known and model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if "use_cache" in known:
        arguments["use_cache"] = False
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # some models start from noise
            output = model(**arguments)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run on a few tokens alone ({one_line(error)}), so its positions cannot "
            "be found by trial."
        ) from error
    values = [getattr(output, name, None) for name in _OUTPUTS]
    texts = [
        v for v in values if isinstance(v, Tensor) and v.dim() == 3 and v.shape[1] == ids.shape[1]
    ]
    if not texts:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no output for each token ({type(output).__name__}), so its positions cannot "
            "be found by trial."
        )
    return [text.double() for text in texts]


def absolute(model: nn.Module) -> dict[str, float]:
    """Repeat one token and return how far rows of the output differ, by module; `""` is the model itself.

    Values are relative to the largest entry of a module's output. A module counts if the rows of its input are equal.
    """
    ids, limit = ordinary_tokens(model, 1).expand(1, TOKENS), tolerance(model)
    moved: dict[str, float] = {}

    def record(path: str, module: nn.Module, call: _Call) -> None:
        if all(_variation(call.rows(text)) <= limit for text in call.texts()):
            moved[path] = max(moved.get(path, 0.0), _variation(call.rows(call.output)))

    with trial(model), _watching(model, record):
        outputs = forward(model, ids)
    moved[""] = max(_variation(output[0]) for output in outputs)
    return moved


def twice(model: nn.Module, mended: Collection[str] = ()) -> dict[str, float]:
    """Show every module a set of rows twice and return how far the last rows of both differ, by module.

    Values are relative to the largest entry of a module's output. `""` is what happens outside of the blocks: the
    embedding of a text that has such a set twice, and the head. A module that is given unequal rows counts for the one
    around it. Outputs of `mended` modules are made equal instead: what they do is known.
    """
    moved: dict[str, float] = {"": 0.0}
    modules = dict(block_modules(model))
    around = {path: _around(path, modules) for path in modules}
    order, limit = torch.tensor(_TWICE), sharp_tolerance(model)
    unequal = False  # the block before

    def note(path: str, values: Tensor) -> float:
        rows = values.detach().movedim(_token_axis(values), 0).flatten(1)
        difference = _share((rows[_LAST[0]] - rows[_LAST[1]]).abs().max(), rows)
        moved[path] = max(moved.get(path, 0.0), difference)
        return difference

    def show(path: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = next(filter(_is_text, (*args, *kwargs.values())), None)
        if hidden is None or hidden.shape[_token_axis(hidden)] != TOKENS:
            return args, kwargs
        if around[path] or not unequal:
            note(around[path], hidden)
        rows = hidden.index_select(_token_axis(hidden), order.to(hidden.device))
        return _exchanged(hidden, rows, args, kwargs)

    def compare(path: str, _: nn.Module, args: Any, output: Any) -> None:
        nonlocal unequal
        result = _first(output)
        if result is None or result.shape[_token_axis(result)] != TOKENS:
            return
        if path in mended:
            for each in _texts(output):
                each.copy_(each.index_select(_token_axis(each), order.to(each.device)))
        else:
            difference = note(path, result)
            unequal = difference > limit if not around[path] else unequal

    handles = []
    for path, module in modules.items():
        before = functools.partial(show, path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(functools.partial(compare, path)))
    with hooked(handles), trial(model):
        outputs = forward(model, ordinary_tokens(model, 3)[:, _TWICE])
    if not unequal:
        for output in outputs:
            note("", output)
    return moved


def _around(path: str, modules: Container[str]) -> str:
    """Return the innermost of some modules, by path, that another one lies in; `""` if it lies in none."""
    while path := path.rpartition(".")[0]:
        if path in modules:
            return path
    return ""


def relative(
    model: nn.Module,
    rows: int = TOKENS - 1,
    *,
    first: int = 0,
    paths: Collection[str] | None = None,
) -> dict[str, float]:
    """Permute the first rows of each module's input and return how far the last row of its output moves, by module.

    Permuted are those from the `first` one up to `rows`; `paths` are the modules that are tried, all by default.

    Values are relative to the largest entry of a module's output. Modules are those of the blocks, outer ones too. A
    block of several attention layers is left out: under a causal mask, the second one reads rows that saw another
    past.
    """

    def permute(values: Tensor) -> Tensor:
        return torch.cat((values[:first], values[first:rows].roll(1, 0), values[rows:]))

    moved = _changed(model, permute, paths)
    limit = tolerance(model)
    if paths is None and any(is_block(path) for path in innermost(moved, limit)):
        mixing = innermost(
            _changed(model, lambda values: torch.cat((-values[:rows], values[rows:]))), limit
        )
        inside = {path: sum(each.startswith(f"{path}.") for each in mixing) for path in moved}
        moved = {path: value for path, value in moved.items() if inside[path] < 2}
    return moved


def _changed(
    model: nn.Module, change: Callable[[Tensor], Tensor], paths: Collection[str] | None = None
) -> dict[str, float]:
    """Change the rows before the last one and return how far the last row of each module's output moves."""
    moved: dict[str, float] = {}

    def record(path: str, module: nn.Module, call: _Call) -> None:
        if paths is not None and path not in paths:
            return
        if len(call.texts()) > 1 and not is_block(
            path
        ):  # which rows of the others belong together is unknown
            return
        axis = _token_axis(call.hidden)
        try:
            again = call.again(module, change(call.hidden.movedim(axis, 0)).movedim(0, axis))
        except Exception:  # a module that cannot be called on its own; the block around it is
            return
        if again is not None and again.shape == call.output.shape:
            last = (call.rows(again)[TOKENS - 1] - call.rows(call.output)[TOKENS - 1]).abs().max()
            moved[path] = max(moved.get(path, 0.0), _share(last, call.output))

    with trial(model), _watching(model, record):
        forward(model, ordinary_tokens(model, TOKENS))
    if not moved and paths is None:
        raise UnsupportedModelError(
            f"No block of {type(model).__name__} could be called on its own, so its positions cannot be found by trial."
        )
    return moved


def shifted(model: Any) -> float:
    """Return how far outputs move if `position_ids` start far away; 0 for a model that takes none.

    All encodings must be silenced, since tables end before such positions.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return 0.0
    ids = ordinary_tokens(model, TOKENS)
    positions = torch.arange(TOKENS, device=ids.device)[None]
    with trial(model):
        try:
            near, far = (
                forward(model, ids, position_ids=positions + start) for start in (0, _SHIFT)
            )
        except UnsupportedModelError:  # a table that was not found, which other experiments see
            return 0.0
    return max(_share((a - b).abs().max(), a) for a, b in zip(far, near, strict=True))


def bidirectional(model: nn.Module) -> bool:
    """Return whether the output of the first token depends on later tokens, as in an encoder."""
    ids = ordinary_tokens(model, TOKENS)
    other = torch.cat((ids[:, :-1], ids[:, :1]), 1)
    with trial(model):
        pairs = zip(forward(model, ids), forward(model, other), strict=True)
        moved = max(_share((a[0, 0] - b[0, 0]).abs().max(), a) for a, b in pairs)
    return moved > tolerance(model)


def innermost(moved: Mapping[str, float], limit: float) -> list[str]:
    """Return the modules that move by more than a limit while nothing inside them does."""
    paths = [path for path, value in moved.items() if path and value > limit]
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


class _Call:
    """One call of a module on the hidden states of a whole text."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor, output: Tensor
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.hidden, self.output = hidden, output

    def rows(self, values: Tensor) -> Tensor:
        """Return values of the first tokens, shape (tokens, features)."""
        return values.detach().movedim(_token_axis(values), 0).flatten(1)[:TOKENS]

    def texts(self) -> list[Tensor]:
        """Return the different arguments with a row for each token."""
        values = (value for value in (*self.args, *self.kwargs.values()) if _is_text(value))
        return list({id(x): x for x in values if x.dim() == self.hidden.dim()}.values())

    def again(self, module: nn.Module, hidden: Tensor) -> Tensor | None:
        """Call the module on other hidden states; its other arguments stay."""
        args, kwargs = _exchanged(self.hidden, hidden, self.args, self.kwargs)
        return _first(module(*args, **kwargs))


def _exchanged(
    old: Tensor, new: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with a tensor in the place of another one."""
    return tuple(new if value is old else value for value in args), {
        key: new if value is old else value for key, value in kwargs.items()
    }


def _token_axis(values: Tensor) -> int:
    """Return the axis of tokens; -1 without one. Models may pad hidden states, or put learned prompts before them."""
    order = (1, 0, 2) if values.dim() == 3 else (2, 1)
    exact = [axis for axis in order if values.shape[axis] == TOKENS]
    padded = [axis for axis in (1, 0) if values.dim() == 3 and values.shape[axis] >= TOKENS]
    return next(iter((*exact, *padded)), -1)


def _is_text(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() not in (3, 4):
        return False
    return _token_axis(value) >= 0


def _first(output: Any) -> Tensor | None:
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        output = getattr(output, "last_hidden_state", None)
    return output if _is_text(output) else None


def _texts(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output that have a row for each token."""
    if isinstance(output, (tuple, list)):
        for each in output:
            yield from _texts(each)
    elif _is_text(output) and output.shape[_token_axis(output)] == TOKENS:
        yield output


def block_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every block, and of every module inside one that has modules of its own."""
    modules, found = dict(model.named_modules()), set[str]()
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or not any(
            module.children()
        ):
            continue
        parent = modules[path.rpartition(".")[0]]
        if _around(path, found) or (path and isinstance(parent, nn.ModuleList)):
            found.add(path)
            yield path, module


def is_block(path: str) -> bool:
    """Return whether a path ends with a number, as those of the blocks of a list do."""
    return path.rpartition(".")[2].isdigit()


Recorder = Callable[[str, nn.Module, _Call], None]


@contextlib.contextmanager
def _watching(model: nn.Module, record: Recorder) -> Iterator[None]:
    """Hand every call of a block, and of a module inside one, to a function; calls that it makes are not watched."""
    busy = False

    def hook(path: str) -> Callable[..., None]:
        def watch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal busy
            values: Sequence[Any] = [*args, *kwargs.values()]
            hidden, result = next(filter(_is_text, values), None), _first(output)
            if busy or hidden is None or result is None:
                return
            busy = True
            try:
                record(path, module, _Call(args, kwargs, hidden, result))
            finally:
                busy = False

        return watch

    modules = block_modules(model)
    with hooked(m.register_forward_hook(hook(path), with_kwargs=True) for path, m in modules):
        yield


def _variation(rows: Tensor) -> float:
    """Return how far rows differ from the first one, relative to the largest entry."""
    return _share((rows - rows[:1]).abs().max(), rows)


def _share(change: Tensor, values: Tensor) -> float:
    largest = float(values.detach().abs().max())
    return float(change) / largest if largest > 0 else 0.0
