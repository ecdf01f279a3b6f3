"""Which method for which length: closed-form facts, what published tables show, and a trial on the model."""

from __future__ import annotations

from hf_posenc.evaluation.recommend.advice import Advice, Carried, recommend
from hf_posenc.evaluation.recommend.limits import CacheCost, RotaryLimits
from hf_posenc.evaluation.recommend.options import Option

__all__ = ["Advice", "CacheCost", "Carried", "Option", "RotaryLimits", "recommend"]
