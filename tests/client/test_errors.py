"""The error tree against its own picture, and what happens to an error on its way."""

from __future__ import annotations

import copy
import re

import pytest

from gemmwire import errors
from gemmwire.errors import GemmwireError, InputError, ServerError, WireError, for_status


def tree(kind: type[Exception], depth: int = 0) -> list[tuple[int, str]]:
    children = [line for child in kind.__subclasses__() for line in tree(child, depth + 1)]
    return [(depth, kind.__name__), *children]


def test_the_picture_is_the_tree() -> None:
    """Guards: a class that the picture in the docstring does not show, or shows elsewhere."""
    lines = re.findall(r"^([│├└─ ]*)([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    drawn = [
        (len(branch) // 4, name)
        for branch, name in lines
        if name.isidentifier() and (branch or name[0] == "G")
    ]
    assert drawn == tree(GemmwireError)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequest"), (401, "Unauthorized"), (403, "Forbidden"), (404, "NotFound"), (409, "Conflict"),
        (413, "TooLarge"), (415, "Unsupported"), (429, "Overloaded"), (503, "Overloaded"),
        (504, "DeadlineExceeded"), (500, "ServerFailed"), (502, "ServerFailed"), (418, "ServerFailed"),
        (307, "ServerFailed"),
    ],
    ids=str,
)  # fmt: skip
def test_a_status_has_its_class(status: int, name: str) -> None:
    """Guards: `except Overloaded` that never sees the 503."""
    assert for_status(status).__name__ == name


@pytest.mark.parametrize(
    "error",
    [
        WireError("frame_invalid", "Cut", status=413, expected=4, got=3),
        InputError("rank_unsupported", "No dimensions"),
        for_status(503)(
            "Full", status=503, code="queue_full", expected=1, got=2, request_id="r", retry_after=1.5
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_copy(error: GemmwireError) -> None:
    """Guards: an error raised in a worker process, which arrives as the TypeError of a constructor."""
    again = copy.copy(error)
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_the_roots_are_what_callers_catch() -> None:
    """Guards: a server's error that is caught as one of the network."""
    assert not issubclass(ServerError, errors.TransportError)
    assert issubclass(errors.TimedOut, errors.TransportError)
    assert issubclass(InputError, TypeError)
    assert issubclass(errors.InvalidArgument, ValueError)
