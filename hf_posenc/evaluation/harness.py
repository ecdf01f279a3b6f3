r"""lm-evaluation-harness with one more model, `hf-posenc`: its own `hf`, patched after loading.

    python -m hf_posenc.evaluation.harness run --model hf-posenc \
        --model_args pretrained=MODEL,patch=yarn:scale=4,dtype=bfloat16 --tasks wikitext

The harness finds no models of other packages by itself; apart from that, the command is `lm_eval`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, movement
from hf_posenc.patch.patching import get_patch, patch_model
from hf_posenc.saving import from_pretrained, load_adapter


@register_model("hf-posenc")
class PatchedLM(HFLM):  # type: ignore[misc]
    """The harness's `hf` model with a patch: one saved with the checkpoint, or `patch`.

    Args:
        pretrained: A checkpoint, also one that was saved with a patch that plain transformers cannot compute; a loaded
            model stays as it is.
        patch: The text of `--patch`, such as `yarn:scale=4` or `rerope`; `none` and `None` leave the model as it is.
            The harness separates arguments by commas: give a patch with several options in a dictionary,
            `--model_args '{"pretrained": "MODEL", "patch": "yarn:scale=4,beta_fast=16"}'`.
        peft: An adapter, with the patch that it carries.
        max_length: The most tokens of a request. By default what the patch reaches, else what the config names. A
            method without its own scale gets `max_length` divided by the original length.

    Raises:
        PosencError: A patch that the model cannot take, a method without a scale, or a table that follows the length
            of the text with a batch of several texts, whose padding it would count.
    """

    AUTO_MODEL_CLASS: Any
    _model: Any

    def __init__(self, pretrained: Any, *, patch: str | None = None, **options: Any) -> None:
        self._candidate: Candidate | None = None
        self._target = options.get("max_length")
        if patch not in (None, UNPATCHED):  # wrong names fail before weights are read
            self._candidate = Candidate.parse(str(patch), unpatched=False)
            self._candidate.check_values()
            if not isinstance(pretrained, str):
                raise PosencError("patch= is for a model that is loaded by name: patch this one.")
        super().__init__(pretrained, **options)
        if self.batch_size != 1 and movement(self.model)[0]:
            raise PosencError(
                "The tables of this patch follow the length of the text, and a batch is padded to its longest: give "
                "batch_size=1."
            )

    def _create_model(self, pretrained: str, *, peft: str | None = None, **options: Any) -> None:
        given = self.AUTO_MODEL_CLASS

        def load(name: str, **options: Any) -> Any:  # the patch that it was saved with, too
            options = {key: value for key, value in options.items() if value not in (None, "")}
            return from_pretrained(name, auto_class=given, **options)

        self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=load)
        try:
            super()._create_model(pretrained, **options)
        finally:
            self.AUTO_MODEL_CLASS = given
        if (candidate := self._candidate) is not None:
            scale = 1.0
            if candidate.auto_scale:
                saved = get_patch(self._model)
                original = None if saved else candidate.checked(self._model).original
                if self._target is None or original is None:
                    way = "and replace=true to drop the saved patch" if saved else "or max_length"
                    problem = f"patch={candidate.spec}: give a scale, as in scale=4, {way}."
                    raise PosencError(problem)
                scale = max(1.0, int(self._target) / original)
            method, options = candidate.arguments(scale)
            patch_model(self._model, method, **options)
        if peft is not None:
            self._model = load_adapter(self._model, peft)

    @property
    def max_length(self) -> int:
        """The most tokens of a request."""
        patch = get_patch(self.model)
        if self._max_length or patch is None or patch.extended_length is None:
            length: int = super().max_length
            return length
        return patch.extended_length


if __name__ == "__main__":
    cli_evaluate()
