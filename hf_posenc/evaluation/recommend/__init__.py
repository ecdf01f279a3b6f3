"""Recommendation of a method for a length: closed-form limits, published evidence, and a trial on the model."""

from __future__ import annotations

from hf_posenc.evaluation.recommend.advice import Advice, CacheCost, Carried, recommend
from hf_posenc.evaluation.recommend.options import Option, RotaryLimits

__all__ = ["Advice", "CacheCost", "Carried", "Option", "RotaryLimits", "recommend"]
