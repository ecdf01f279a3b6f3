"""transformers' report on a checkpoint's keys, without what is read right after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from hf_posenc.seams.parameters import PARAMETERS

_STATUS = "UNEXPECTED"


@contextlib.contextmanager
def without_own_parameters() -> Iterator[None]:
    """Leaves out a report that says nothing but that the parameters of a patch are unexpected.

    The model is loaded before it is patched, so transformers has no place for them yet. A report that says anything
    else besides is shown whole.
    """
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_says_more)
    try:
        yield
    finally:
        logger.removeFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    rows = [line for line in record.getMessage().splitlines() if line.count("|") > 1]
    # The first row is the heading; on a terminal the status is in colour.
    return len(rows) < 2 or any(
        f".{PARAMETERS}." not in row or _STATUS not in row for row in rows[1:]
    )
