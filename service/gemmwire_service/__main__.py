"""gemmwire-serve: the service's command line. Without a command it serves."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from .interrupt import EARLY
from .openmp import wait_shortly
from .standard_output import discard, is_of_output

_INTERRUPTED, _NOBODY_READS = 130, 141  # as a shell has them
_EXTRA = "The service's packages are not installed ({}); run: pip install 'gemmwire[service]'"

Command = Callable[[Sequence[str]], int]


def _serve() -> Command:
    """Exit status: 0 after a graceful stop, 1 where loading failed."""
    wait_shortly()
    from .serve import serve
    from .settings import load

    return lambda arguments: serve(load(arguments))


def _check() -> Command:
    """Exit status: 0 where the backend that would serve works, 1 where none does."""
    from .doctor.command import main as check

    return check


def _quantize() -> Command:
    """Exit status: 0 where the new checkpoint is complete."""
    from .quantize.command import main as quantize

    return quantize


def _accuracy() -> Command:
    """Exit status: 0; 1 where a layer's verdict is the one of --fail-on, or worse."""
    from .accuracy.command import main as accuracy

    return accuracy


def _key() -> Command:
    """Exit status: 0 where a key was drawn, and written down if that was asked."""
    from .new_key import main as key

    return key


# Each is imported when it is called: an installation without the server's packages can still check.
COMMANDS: dict[str, Callable[[], Command]] = {
    "serve": _serve,
    "check": _check,
    "quantize": _quantize,
    "accuracy": _accuracy,
    "key": _key,
}
DEFAULT = "serve"


def _unknown(name: str) -> str:
    near = get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {near[0]}?" if near else f"to serve a checkpoint, say --model {name}"
    return f"there is no command {name!r}; there are {', '.join(COMMANDS)}; {meant}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: that of the command; 2 where its arguments are wrong, its packages are not installed or
    what it prints cannot be written."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else (DEFAULT, given)
    if name not in COMMANDS:
        print(f"gemmwire-serve: {_unknown(name)}", file=sys.stderr)
        return 2
    EARLY.listen()
    try:
        from .errors import ServiceError

        command = COMMANDS[name]()
    except ModuleNotFoundError as error:
        print("gemmwire-serve: " + _EXTRA.format(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    try:
        status = command(rest)
        sys.stdout.flush()
        return status
    except ServiceError as error:
        print(f"gemmwire-serve: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not is_of_output(error):
            raise
        discard()
        return _not_printed(error)
    except KeyboardInterrupt:  # before the server has its own way to stop
        return _INTERRUPTED


def _not_printed(error: OSError) -> int:
    if error.errno == errno.EPIPE:  # `gemmwire-serve accuracy MODEL | head`
        return _NOBODY_READS
    print(f"gemmwire-serve: standard output cannot be written to: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
