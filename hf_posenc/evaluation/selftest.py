"""The earlier name of `hf_posenc.evaluation.device.selftest`."""

from hf_posenc.evaluation.device.result import GpuResult as SelftestResult
from hf_posenc.evaluation.device.selftest import selftest

__all__ = ["SelftestResult", "selftest"]
