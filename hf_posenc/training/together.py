"""What the processes of one run say to each other; with one process, nothing is sent.

accelerate's own operations: they know every backend that the Trainer runs on.
"""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T")


def wait() -> None:
    """Returns once every process has come here."""
    from accelerate import PartialState

    PartialState().wait_for_everyone()


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process: the same answer in all of them."""
    from accelerate import PartialState
    from accelerate.utils import reduce

    state = PartialState()
    if state.num_processes == 1:
        return flag
    return bool(reduce(torch.tensor(int(flag), device=state.device), "max").item())


def gathered(value: T) -> list[T]:
    """The value of every process, in the order of their ranks; any JSON-like object."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    if PartialState().num_processes == 1:
        return [value]
    return list(gather_object([value]))
