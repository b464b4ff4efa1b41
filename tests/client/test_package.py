"""What `import gemmwire` gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmwire
from gemmwire import errors

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_version_is_the_distribution_s() -> None:
    """Guards: two places that say it, and one that is forgotten at a release."""
    written = re.search(r'^version = "(.+)"$', PYPROJECT.read_text(), re.MULTILINE)
    assert written is not None
    assert gemmwire.__version__ == written[1]


def test_every_error_of_the_tree_is_exported() -> None:
    """Guards: an error that can be caught only by knowing where it lives."""
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name[0] != "_"}
    raised = {name for name in defined if issubclass(getattr(errors, name), errors.GemmwireError)}
    assert raised - set(gemmwire.__all__) == set()
    assert all(getattr(gemmwire, name) is getattr(errors, name) for name in raised)


def test_exports_are_loaded_on_first_use_and_listed_before() -> None:
    """Guards: a server that pays for the client to use the codec, and names that completion does not find."""
    program = """if True:
        import sys, gemmwire
        print(*sorted(name for name in sys.modules if name.startswith("gemmwire.")))
        print({"Client", "TooLarge", "__version__"} <= set(dir(gemmwire)))
        import gemmwire.wire
        print("gemmwire.client" in sys.modules)
        gemmwire.Client
        print("gemmwire.client" in sys.modules, "Client" in vars(gemmwire))
        print(sorted({"http.client", "email", "ssl", "asyncio", "importlib.metadata"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["", "True", "False", "True True", "[]"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Guards: hasattr() that raises, or finds the name of a module's own import."""
    with pytest.raises(AttributeError, match="module 'gemmwire' has no attribute 'client_of'"):
        getattr(gemmwire, "client" + "_of")
    assert not hasattr(gemmwire, "for_status")
