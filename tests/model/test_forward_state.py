"""The state of a forward belongs to the forward: nothing that it computes is left on what other forwards read."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_posenc import PosencError, patch_model
from hf_posenc.methods import LogN, YaRN
from hf_posenc.model import masks
from hf_posenc.model.forward import running
from tests.support import zoo
from tests.support.ways_to_run import Kind, at_once
from tests.support.zoo import CACHE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# A type for each way in which positions reach attention, with the patches of that way.
PATCHES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "llama": (
        ("yarn", {"scale": 2}),
        ("dynamic_ntk", {"update": "row", "original_max_position_embeddings": 16}),
        ("dynamic_ntk", {"update": "request", "original_max_position_embeddings": 16}),
        ("dynamic_ntk", {"update": "sequence", "original_max_position_embeddings": 16}),
        *((name, {"original_max_position_embeddings": 16}) for name in ("rerope", "dual_chunk")),
        *((name, {}) for name in ("alibi", "fire", "log_n", "shaw")),
        ("dpe", {"factors": [2, 4], "window": 8}),
    ),
    "gptj": (("rerope", {"window": 8}), ("alibi", {})),
    "roformer": (("rerope", {"window": 8}), ("alibi", {})),
    "falcon": (("rerope", {"window": 8}),),
    "persimmon": (("rerope", {"window": 8}),),
    "moshi": (("rerope", {"window": 8}),),
    "modernbert": (("rerope", {"window": 8}), ("alibi", {})),
    "t5gemma2": (("rerope", {"window": 8}),),
    "bloom": (("alibi", {"scale": 2}),),
    "mpt": (("alibi", {"scale": 2}),),
    "gpt2": (("alibi", {}), ("nope", {}), ("interpolate", {"scale": 4, "update": "request"})),
    **{
        kind: (("alibi", {}),)
        for kind in (
            *("gpt_neo", "gpt_bigcode", "opt", "biogpt", "xglm", "bert", "rembert", "bart"),
            *("marian", "m2m_100", "mvp", "pegasus", "ctrl", "mpnet"),
        )
    },
}
CASES = [(kind, *patch) for kind, patches in PATCHES.items() for patch in patches]
# Where another patch or type takes the same way: a method that is alike, or a table of positions that is learned.
ALIKE = {("llama", "log_n"), ("gptj", "alibi"), ("roformer", "alibi"), ("gpt2", "nope")} | {
    (kind, "alibi")
    for kind in ("gpt_bigcode", "biogpt", "xglm", "rembert", "marian", "m2m_100", "mvp", "pegasus")
}
# These in each test; the others take turns.
ALWAYS = {("llama", "rerope"), ("gptj", "rerope"), ("bloom", "alibi"), ("gpt2", "interpolate")}


def every(turn: int) -> list[Any]:
    """Every case; all but `ALWAYS` and a third of the others are slow."""
    one = [case for case in CASES if case[:2] not in ALIKE | ALWAYS]
    fast = [*(case for case in CASES if case[:2] in ALWAYS), *one[turn::3]]
    return [
        pytest.param(
            *case,
            id="-".join(map(str, (*case[:2], *case[2].values()))),
            marks=() if case in fast else pytest.mark.slow,
        )
        for case in CASES
    ]


# Every case of its turn, with one kind of checkpointing.
AGAIN = [
    pytest.param(
        *case.values,
        reentrant,
        id=f"{case.id}-{reentrant}",
        marks=case.marks if turn % 2 == reentrant else pytest.mark.slow,
    )
    for turn, case in enumerate(every(2))
    for reentrant in (False, True)
]
LENGTHS = 20, 36
_PATCHED: dict[str, PreTrainedModel] = {}


def built(kind: str, name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Return a copy of a patched model without dropout."""
    key = f"{kind} {name} {options}"
    if key not in _PATCHED:
        _PATCHED[key] = patch_model(Kind(kind, name, options, "").build(), name, **options)
    return copy.deepcopy(_PATCHED[key])


def arguments(model: PreTrainedModel, length: int) -> dict[str, Any]:
    ids = zoo.tokens(length, seed=length)
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    return {"input_ids": ids}


def output(model: Any, given: dict[str, Any]) -> Tensor:
    decodes = getattr(model.config, "use_cache", None) is not None
    logits: Tensor = model(**given, **({"use_cache": False} if decodes else {})).logits
    return logits


# Nothing is written.

# What may differ after a forward, by the class that holds it and the name; else it is compared by identity.
ALLOWED = {
    ("PosencRotary", "_warned"): "a warning that is given once",
    ("PosencRotary", "_engines"): "a table for each device",
    ("Rotation", "_kept"): "tables by length and device, which are what they are for every forward",
    ("Silenced", "_made"): "made of a table, kept by its values",
    ("ByRequest", "_made"): "made of a table, kept by its values",
    ("RepositionedTable", "_kept"): "rows of a table, kept by its identity",
    ("GrowingPlan", "_fixed"): "the plans of lengths, kept by them",
}


def held_by(model: nn.Module) -> Iterator[tuple[object, str, Any]]:
    """Yield every attribute of modules, configs, hooks, and of what belongs to hf_posenc in these, classes too."""
    waiting: list[Any] = [*model.modules()]
    seen: set[int] = set()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, types.ModuleType | Tensor):
            continue
        seen.add(id(holder))
        if isinstance(holder, type):
            own = vars(holder).items() if holder.__module__.startswith("hf_posenc") else ()
            yield from ((holder, name, value) for name, value in [*own])
            continue
        if isinstance(holder, types.MethodType):
            waiting.append(holder.__self__)
        elif isinstance(holder, dict):
            waiting += [value for value in holder.values() if not isinstance(value, Tensor)]
        elif isinstance(holder, list | tuple | set | frozenset):
            waiting += [value for value in holder if not isinstance(value, Tensor)]
        ours = type(holder).__module__.startswith("hf_posenc")
        ours = ours or isinstance(holder, nn.Module) or hasattr(holder, "get_text_config")
        if not ours or not hasattr(holder, "__dict__"):
            continue
        for name, value in [*vars(holder).items()]:
            if isinstance(value, dict):
                for key, entry in value.items():
                    yield holder, f"{name}[{key}]", entry
            else:
                yield holder, name, value
            waiting.append(value)
        waiting.append(type(holder))


def snapshot(model: nn.Module) -> dict[tuple[int, str], tuple[str, Any]]:
    found = {}
    for holder, name, value in held_by(model):
        if (type(holder).__name__, name.partition("[")[0]) not in ALLOWED:
            found[id(holder), name] = type(holder).__name__, value
    return found


@pytest.mark.parametrize(("kind", "name", "options"), every(1))
def test_a_forward_writes_nothing_shared(kind: str, name: str, options: dict[str, Any]) -> None:
    """Neither while it runs, seen from each of its modules, nor afterwards."""
    model = built(kind, name, options)
    before, differs = snapshot(model), set[str]()
    absent: tuple[str, Any] = "", None
    watched = [module for module in model.modules() if not any(module.children())]
    watched = watched[:: max(1, len(watched) // 12)]

    def compare(*_: Any) -> None:
        now = snapshot(model)
        for key in before.keys() | now.keys():
            old, (holder, new) = before.get(key, absent)[1], now.get(key, absent)
            if old is not new and not (type(old) is type(new) in (int, str, float) and old == new):
                differs.add(f"{holder}.{key[1]}")

    hooks = [module.register_forward_hook(compare) for module in watched]
    before = snapshot(model)
    with torch.no_grad():
        output(model, arguments(model, LENGTHS[1]))
    compare()
    for hook in hooks:
        hook.remove()
    assert not differs
    assert running() is None


def test_a_forward_that_raises_leaves_nothing() -> None:
    for kind, name, options in (
        CASES[2],
        *(case for case in CASES if case[0] in ("gpt_neo", "gpt2")),
    ):
        model = built(kind, name, options)
        given = arguments(model, LENGTHS[1])
        with torch.no_grad():
            want = output(model, given)

            def stop(*_: Any) -> None:
                raise KeyboardInterrupt

            hook = [*model.modules()][-1].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                output(model, {key: value[:, :9] for key, value in given.items()})
            hook.remove()
            assert running() is None
            assert torch.equal(output(model, given), want)


# Threads


@pytest.mark.parametrize(("kind", "name", "options"), every(0))
def test_threads_get_positions_of_their_own(kind: str, name: str, options: dict[str, Any]) -> None:
    model = built(kind, name, options)
    texts = [arguments(model, length) for length in LENGTHS]

    def work(given: dict[str, Any], times: int = 8) -> list[Tensor]:
        with torch.no_grad():
            return [output(model, given) for _ in range(times)]

    alone = [work(text, times=1)[0] for text in texts]
    together = at_once([functools.partial(work, text) for text in texts])
    for want, results in zip(alone, together, strict=True):
        assert max(zoo.relative_difference(got.double(), want.double()) for got in results) < 1e-6


# Gradient checkpointing


def padded(given: dict[str, Any]) -> dict[str, Any]:
    """Return two rows of a text, of which the second ends earlier."""
    rows = {key: value.expand(2, -1) for key, value in given.items()}
    mask = torch.ones_like(rows["input_ids"])
    mask[1, -4:] = 0
    return {**rows, "attention_mask": mask}


def gradients(
    model: Any, given: dict[str, Any], between: dict[str, Any] | None
) -> dict[str, Tensor]:
    torch.manual_seed(0)  # for dropout that no module does, and noise in routers
    model.zero_grad()
    loss = output(model, given).float().square().mean()
    if between is not None:
        with torch.no_grad():
            output(model, between)
    loss.backward()
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in dict(model.named_parameters()).items()
    }


@pytest.mark.parametrize(("kind", "name", "options", "reentrant"), AGAIN)
def test_a_layer_that_is_computed_again_has_its_own_forward(
    kind: str, name: str, options: dict[str, Any], reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another forward, of the same length and of another one, between a forward and its backward.

    Also of padded texts, whose masks are handed over as those of long texts are.
    """
    model: Any = built(kind, name, options).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{kind} does not support gradient checkpointing")
    if reentrant:
        model.enable_input_require_grads()
    if kind != "t5gemma2":  # whose parts join masks, which must be written
        monkeypatch.setattr(masks, "DENSE", 0)
    text, longer = (arguments(model, length) for length in LENGTHS)
    same = {key: value.flip(1) for key, value in text.items()}
    for given, others in ((text, (same, longer)), (padded(text), (padded(longer),))):
        model.gradient_checkpointing_disable()
        want = gradients(model, given, None)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        for between in others:
            found = gradients(model, given, between)
            size = max(float(value.abs().max()) for value in want.values())
            assert max(float((found[key] - want[key]).abs().max()) for key in want) < 1e-5 * size


@torch.no_grad()
def test_a_long_mask_that_a_module_changes_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("doge", "rerope", {})
    given = padded(arguments(model, LENGTHS[0]))
    want = output(model, given)
    monkeypatch.setattr(masks, "DENSE", 0)
    torch.testing.assert_close(output(model, given), want)


# What was changed since the patch, or another patch has filled


@pytest.mark.parametrize("name", ["rerope", "alibi", "kerple_log"])
@pytest.mark.parametrize(("kind", "causal"), [("llama", False), ("bert", True)])
def test_a_direction_set_after_the_patch_is_refused(kind: str, causal: bool, name: str) -> None:
    """The unpatched model follows it; the patched one says that it cannot."""
    if kind == "bert" and name == "rerope":
        pytest.skip("BERT has no rotation")
    model = built(kind, name, {"window": 8} if name == "rerope" else {})
    given = arguments(model, LENGTHS[0])
    for module in model.modules():
        if hasattr(module, "is_causal"):
            vars(module)["is_causal"] = causal
    with pytest.raises(PosencError, match=f"is_causal was {not causal} when .* patched"):
        output(model, given)


@torch.no_grad()
def filled(model: Any, ids: Tensor, cache: Any = None) -> Any:
    return model(input_ids=ids, **{CACHE: cache}, use_cache=True)[CACHE]


COMPUTED = pytest.mark.parametrize("name", ["rerope", "dynamic_ntk", "alibi", "yarn", "yarn+log_n"])


def patched_by(model: Any, name: str) -> Any:
    """A model patched by a method, or by two of which transformers' own attention computes the second."""
    if name == "yarn+log_n":
        return patch_model(model, [YaRN(scale=2), LogN()], replace=True)
    scale: dict[str, Any] = {} if name in ("rerope", "alibi") else {"scale": 2}
    return patch_model(model, name, replace=True, **scale)


@COMPUTED
def test_a_cache_of_another_patch_is_refused(name: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(30)
    cache = filled(patch_model(model, "rerope", window=4), ids[:, :10])
    patched_by(model, name)
    with pytest.raises(PosencError, match=r"10 tokens that were computed with rerope\(window=4"):
        filled(model, ids[:, 10:], cache)
    filled(model, ids[:, 20:], filled(model, ids[:, :20]))


@COMPUTED
def test_a_cache_that_was_filled_before_the_patch_is_found(name: str) -> None:
    """A frequency method warns, since its keys may be learned ones, which have no rotation."""
    model, ids = zoo.build("llama"), zoo.tokens(30)
    cache = filled(model, ids[:, :10])
    patched_by(model, name)
    words = f"10 tokens that were computed before the model was patched with {name.split('+')[0]}"
    if name.startswith("yarn"):
        with pytest.warns(UserWarning, match=words):
            filled(model, ids[:, 10:], cache)
    else:
        with pytest.raises(PosencError, match=words):
            filled(model, ids[:, 10:], cache)


def requested() -> Any:
    options = {"update": "request", "bucket": 8, "original_max_position_embeddings": 16}
    return built("llama", "dynamic_ntk", options)


def test_packed_texts_have_no_length_of_a_request() -> None:
    model, ids = requested(), zoo.tokens(30)
    positions = torch.cat((torch.arange(12), torch.arange(18)))[None]
    for options in ({"use_cache": False}, {CACHE: DynamicCache()}):
        with pytest.raises(PosencError, match="several texts in one row"):
            model(input_ids=ids, position_ids=positions, **options)
    model(input_ids=ids, position_ids=torch.arange(30)[None], use_cache=False)


def test_a_longer_table_by_request_takes_no_packed_texts_and_no_drafts() -> None:
    model: Any = built("gpt2", "interpolate", {"scale": 4, "update": "request"})
    positions = torch.arange(40).repeat(2)[None]
    with pytest.raises(PosencError, match="several texts in one row"):
        model(input_ids=zoo.tokens(80), position_ids=positions, use_cache=False)
    ids = zoo.tokens(8).repeat(1, 9)[:, :61]
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(PosencError, match="in the first forward of a text"):
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@torch.no_grad()
def test_a_cropped_cache_has_the_length_of_its_request_or_is_refused() -> None:
    """As in assisted decoding, whose drafts are cropped, past several buckets; and cropped into the prompt."""
    model, ids = requested(), zoo.tokens(60)
    cache = filled(model, ids[:, :20])
    want = model(input_ids=ids[:, 20:24], **{CACHE: copy.deepcopy(cache)}).logits
    drafts = filled(model, ids[:, 20:24].flip(1), copy.deepcopy(cache))
    drafts = filled(model, ids[:, 24:50], drafts)
    drafts.crop(-30)
    got = model(input_ids=ids[:, 20:24], **{CACHE: drafts}).logits
    assert zoo.relative_difference(got.double(), want.double()) < 1e-6
    drafts.crop(-9)
    with pytest.raises(PosencError, match="cropped into the text"):
        filled(model, ids[:, 15:20], drafts)


@torch.no_grad()
def test_rows_of_a_request_are_repeated_or_chosen_where_they_have_one_length() -> None:
    model, ids = requested(), zoo.tokens(30, batch=2)
    cache = filled(model, ids[:, :20])
    cache.batch_repeat_interleave(2)
    more = ids[:, 20:].repeat_interleave(2, 0)
    got = model(input_ids=more, **{CACHE: cache}).logits
    want = model(input_ids=ids[:, 20:], **{CACHE: filled(model, ids[:, :20])}).logits
    assert zoo.relative_difference(got[::2].double(), want.double()) < 1e-6
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    empty = DynamicCache(config=model.config)
    first = model(input_ids=ids[:, :20], attention_mask=mask[:, :20], **{CACHE: empty})[CACHE]
    first.batch_repeat_interleave(2)
    longer = mask[:, :21].repeat_interleave(2, 0)
    with pytest.raises(PosencError, match="has other rows since"):
        model(input_ids=more[:, :1], attention_mask=longer, **{CACHE: first})


def test_drafts_behind_the_text_of_a_request_are_refused() -> None:
    """They would count in its length; without them, or behind a first forward, all is well."""
    model, ids = requested(), zoo.tokens(20, batch=1).tile(1, 2)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    with pytest.raises(PosencError, match="logits_to_keep=4 in the first forward"):
        model.generate(ids, prompt_lookup_num_tokens=3, **options)
    model(input_ids=ids, logits_to_keep=3, use_cache=False)
    filled(model, ids[:, 20:], filled(model, ids[:, :20]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["rerope", "yarn"])
def test_the_keys_of_a_patch_are_its_own_wherever_they_are(name: str) -> None:
    """After a forward that raised behind its layers, in another cache of both texts, and changed in a copy."""
    options = {"window": 4} if name == "rerope" else {"scale": 2}
    model, ids = built("llama", name, options), zoo.tokens(30)
    cache = DynamicCache(config=model.config)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids[:, :20], **{CACHE: cache})
    hook.remove()
    joined: Any = copy.deepcopy(cache)
    for layer in joined.layers:
        layer.keys, layer.values = (torch.cat((x, x)) for x in (layer.keys, layer.values))
    want = model(input_ids=ids).logits[:, 20:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = model(input_ids=ids[:, 20:].tile(2, 1), **{CACHE: joined}).logits
    assert zoo.relative_difference(got[1:].double(), want.double()) < 1e-5


@torch.no_grad()
def test_a_cache_of_both_texts_is_built_again_from_its_parts() -> None:
    model = built("t5", "t5", {"scale": 2})
    ids = zoo.tokens(16)
    cache = model(input_ids=ids, decoder_input_ids=ids[:, :9], use_cache=True)[CACHE]
    again = type(cache)(cache.self_attention_cache, cache.cross_attention_cache)
    want = model(input_ids=ids, decoder_input_ids=ids[:, :10]).logits[:, 9:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = model(input_ids=ids, decoder_input_ids=ids[:, 9:10], **{CACHE: again}).logits
    assert zoo.relative_difference(got.double(), want.double()) < 1e-5


def test_a_cache_of_the_same_method_in_other_layers_is_refused() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(30)
    cache = filled(patch_model(model, "rerope", window=4), ids[:, :10])
    patch_model(model, "rerope", window=4, layers=[1], replace=True)
    with pytest.raises(PosencError, match="10 tokens that were computed with"):
        filled(model, ids[:, 10:], cache)
