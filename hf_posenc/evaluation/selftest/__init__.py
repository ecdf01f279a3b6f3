"""The engine's backends on this machine: which are right, how fast they are, and what waits for the device."""

from hf_posenc.evaluation.selftest.result import SelftestResult as SelftestResult
from hf_posenc.evaluation.selftest.run import selftest as selftest
