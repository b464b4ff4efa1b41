"""gemmwire-serve: the service's command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EXTRA = "The service's packages are not installed ({}); run: pip install 'gemmwire[service]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a graceful stop, 1 where loading failed, 2 where the settings are wrong."""
    try:
        # Imported here, so that an installation of the client alone says what it lacks.
        from .errors import ServiceError
        from .serve import serve
        from .settings import load
    except ModuleNotFoundError as error:
        print("gemmwire-serve: " + _EXTRA.format(error), file=sys.stderr)
        return 2
    try:
        return serve(load(sys.argv[1:] if arguments is None else arguments))
    except ServiceError as error:
        print(f"gemmwire-serve: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
