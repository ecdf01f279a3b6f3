"""Distillation against its definition: whole logits of model and teacher, log-softmaxes and their sum in float64."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hf_posenc import PosencError, get_patch, patch_model
from hf_posenc.training import PositionCollator, choose_parameters, distill, unpatched_teacher
from hf_posenc.training.options import Trained
from tests.evaluation.scoring.test_head_replay import PositionBias, largest
from tests.support import zoo
from tests.support.selection import late
from tests.training.test_chunked_loss import assert_same, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
WEIGHT, CHUNK, ITEMS = 0.7, 16, 50
PROMPT = [5, 6, 7]


def batch_of(positions: str) -> dict[str, Any]:
    """Three texts, of which one is shorter and one has labels for a part only."""
    more: dict[str, Any] = {} if positions in ("contiguous", "packed") else {"target_length": 200}
    if positions == "endprompt":
        more["terminal_prompt"] = PROMPT
    rows: list[dict[str, Any]] = [
        {"input_ids": zoo.tokens(n, seed=n)[0].numpy(), "document_lengths": [7, n - 7]}
        for n in ((41, 41, 41) if positions == "packed" else (41, 40, 33))
    ]
    rows[0]["labels"] = [-100] * 9 + rows[0]["input_ids"][9:].tolist()
    return PositionCollator(positions, **more)(rows)


def contiguous(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch at positions 0 .. n - 1; that of packed documents, which has no mask, as it is."""
    return {k: v for k, v in batch.items() if k != "position_ids" or "attention_mask" not in batch}


def model_of(method: str, train: Any, teaches: bool) -> tuple[Any, Any]:
    """A patched model whose trained weights have moved, and its unpatched teacher."""
    options: dict[str, Any] = {"yarn": {"scale": 4}, "rerope": {"window": 16}}.get(method, {})
    model: Any = patch_model(zoo.build("llama"), method, **options)
    teacher = unpatched_teacher(model, train) if teaches else None
    model = choose_parameters(model, train)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.02)
    return model.train(), teacher


def divergence(logits: Tensor, teachers: Tensor, labels: Tensor) -> Tensor:
    """The sum of KL(teacher || model) over the tokens with a label, each at the token before it."""
    ours, theirs = (each.double()[:, :-1].log_softmax(-1) for each in (logits, teachers.detach()))
    each = (theirs.exp() * (theirs - ours)).sum(-1)
    return each[labels[:, 1:] != -100].sum()


def defined(model: Any, batch: dict[str, Any], teaches: bool, items: int | None) -> Any:
    """Loss and gradients by the definition; the teacher is a model of the same seed that was never patched."""
    given = {} if items is None else {"num_items_in_batch": items}
    model.zero_grad()
    output, trained_at = model(**{**batch, "use_cache": False}, **given), contiguous(batch)
    view = {k: v for k, v in trained_at.items() if k not in ("labels", "use_cache")}
    again = model(**view, use_cache=False).logits
    if teaches:
        theirs = zoo.build("llama")(**view, use_cache=False).logits
        term = divergence(again, theirs, batch["labels"])
    else:
        term = divergence(output.logits, again, batch["labels"])
    loss = output.loss + WEIGHT * term / (items or int((batch["labels"][:, 1:] != -100).sum()))
    loss.backward()
    gradients = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    return loss.detach().float(), gradients


@pytest.mark.parametrize(
    ("teaches", "positions", "method", "train", "checkpointing"),
    [
        (False, "pose", "rerope", "full", True),
        (False, "endprompt", "yarn", "lora", False),
        (True, "pose", "yarn", "lora", False),
        (True, "packed", "rerope", "full", False),
        (True, "endprompt", "kerple_log", "encoding", True),
        *late([False], ["random", "cream"], ["yarn"], ["full"], [False]),
        *late([True], ["contiguous", "random"], ["yarn"], ["full", "lora"], [True]),
    ],
)
@pytest.mark.parametrize("items", [None, *late([ITEMS])])
def test_loss_and_gradients_are_those_of_the_definition(
    teaches: bool, positions: str, method: str, train: str, checkpointing: bool, items: int | None
) -> None:
    model, teacher = model_of(method, train, teaches)
    batch = batch_of(positions)
    expected = defined(model, batch, teaches, items)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    distill(model, positions=positions, weight=WEIGHT, teacher=teacher, chunk=CHUNK)
    given = {k: v for k, v in batch.items() if k != "use_cache"}
    found = trained(model, **given, **({} if items is None else {"num_items_in_batch": items}))
    assert_same(found, expected, 2e-5)
    assert model.eval()(**batch).loss < found[0] - 0.01  # in evaluation, the loss alone


def test_what_is_trained_does_not_change_the_teacher_and_frozen_weights_are_one() -> None:
    for train in get_args(Trained)[:2]:
        patched: Any = patch_model(zoo.build("llama"), "rerope", window=16)
        teacher: Any = unpatched_teacher(patched, train)
        ids = zoo.tokens(60)
        assert torch.equal(teacher(ids).logits, zoo.build("llama")(ids).logits)
        assert get_patch(patched) is not None
        assert (teacher.lm_head.weight is patched.lm_head.weight) is (train == "lora")
        assert teacher.lm_head.weight.requires_grad is (train == "lora")


@pytest.mark.parametrize("teaches", [True, False])
def test_the_teacher_has_no_dropout(teaches: bool) -> None:
    model: Any = patch_model(zoo.build("llama", attention_dropout=0.5), "yarn", scale=4)
    teacher: Any = unpatched_teacher(model) if teaches else None
    handle = distill(model.train(), positions="pose", teacher=teacher, chunk=CHUNK)
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        if not output.last_hidden_state.requires_grad:
            seen.append(output.last_hidden_state)

    (teacher or model).model.register_forward_hook(keep)
    for _ in range(2):
        model(**batch_of("pose")).loss.backward()
    assert torch.equal(*seen)
    assert teacher is None or all(weight.grad is None for weight in teacher.parameters())
    handle.remove()
    assert "logits" in model(**batch_of("pose"))


def test_no_whole_logits_exist() -> None:
    vocabulary, chunk = 1024, 8
    for teaches in (False, True):
        model: Any = patch_model(zoo.build("llama", vocab_size=vocabulary), "yarn", scale=4)
        teacher = unpatched_teacher(model, "lora") if teaches else None
        distill(model.train(), positions="pose", teacher=teacher, chunk=chunk)
        rows = [{"input_ids": zoo.tokens(64, seed=n)[0].numpy()} for n in range(2)]
        batch = PositionCollator("pose", target_length=200)(rows)
        assert largest(partial(trained, model, **batch)) == vocabulary * 64  # the head's weights


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positions": "pose", "weight": 0.0}, "a positive number, not 0.0"),
        ({"positions": "packed"}, "'packed' are those that a model would teach itself at. Use one of pose"),
    ],
)  # fmt: skip
def test_what_cannot_be_distilled_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message) as raised:
        distill(patch_model(zoo.build("llama"), "yarn", scale=4), **given)
    assert "\n" not in str(raised.value)


def test_a_model_without_a_loss_in_chunks_is_refused() -> None:
    model: Any = PositionBias(zoo.tiny_config("llama"))
    with pytest.raises(PosencError, match="PositionBias cannot be computed in chunks"):
        distill(model, positions="pose")
