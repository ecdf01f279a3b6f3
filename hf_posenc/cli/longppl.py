"""`--longppl EVALUATOR`: the model that says which tokens need far context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.session import Session, open_session

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import TokenizedDocument
    from hf_posenc.evaluation.key_tokens import Evaluator


def open_evaluator(
    asked: str,
    measured: Session,
    *,
    short: int | None,
    longest: int,
    original: int | None,
    bos: str,
    **options: Any,
) -> Evaluator:
    """Loads what was asked for.

    Args:
        asked: `NAME`, `self`, or either with `@METHOD` behind it.
        measured: The session of the model that is measured.
        short: Tokens of the short context, where they were given.
        longest: The longest length of the run, in tokens.
        original: The measured model's trained length, where it is known.
        bos: Policy for special tokens.
        **options: How to load the evaluator, as `open_session` takes it.

    Raises:
        PosencError: It cannot be loaded, or cannot be patched so.
    """
    from hf_posenc.evaluation.candidates import Candidate
    from hf_posenc.evaluation.key_tokens import SELF, Evaluator, default_short, split_evaluator
    from hf_posenc.evaluation.runs import special_tokens

    name, spec = split_evaluator(asked)
    session = measured if name == SELF else open_session(name, **options)
    return Evaluator(
        name=name,
        model=session.model,
        tokenizer=session.tokenizer,
        candidate=Candidate.parse(spec).checked(session.model),
        special=special_tokens(session.tokenizer, bos),
        short=short or default_short(longest, original),
    )


def again(
    source: Iterable[Any], documents: Iterable[TokenizedDocument], tokenizer: Any
) -> list[TokenizedDocument]:
    """The same documents once more, in another tokenizer's tokens; reading stops after the last of them.

    Args:
        source: The reader, from its beginning.
        documents: Those that are wanted.
        tokenizer: The other tokenizer.
    """
    from hf_posenc.evaluation.documents import load_documents

    wanted = {document.name for document in documents}

    def only() -> Iterator[Any]:
        for item in source:
            if item.name in wanted:
                wanted.discard(item.name)
                yield item
            if not wanted:
                return

    return load_documents(only(), tokenizer, min_tokens=1)[0]
