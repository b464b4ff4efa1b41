"""Standard output that nobody reads any more, or that has no room."""

from __future__ import annotations

import errno
import os
import sys

_FAILURES = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def is_of_output(error: OSError) -> bool:
    """Whether printing raised it: an error of a file names that."""
    return error.filename is None and error.errno in _FAILURES


def discard() -> None:
    """What is left of it and what comes goes nowhere, or Python would try again at its end and fail then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
