"""The self-test of a device, of the room `hf_posenc.evaluation.device`."""

from hf_posenc.evaluation.device.result import SelftestResult
from hf_posenc.evaluation.device.selftest import selftest

__all__ = ["SelftestResult", "selftest"]
