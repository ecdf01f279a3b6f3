"""Steps that the processes of one run take together; with one process, nothing is sent.

accelerate's own operations: they know every backend that the Trainer runs on. What processes tell each other about is
in `ranks`.
"""

from __future__ import annotations

import torch


def wait() -> None:
    """Returns once every process has come here."""
    from accelerate import PartialState

    PartialState().wait_for_everyone()


def leave() -> None:
    """Ends the talk before all processes end on purpose: a torn connection would be reported as a crash."""
    from accelerate import PartialState

    wait()
    PartialState().destroy_process_group()


def largest(number: int) -> int:
    """The largest of all processes' numbers: the same answer in all of them."""
    from accelerate import PartialState
    from accelerate.utils import reduce

    state = PartialState()
    if state.num_processes == 1:
        return number
    return int(reduce(torch.tensor(number, device=state.device), "max").item())
