"""Who may import whom, read from the ASTs: no test of behaviour sees a careless import."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from source_tree import CLIENT, ROOT, SERVICE, Import, imports, modules, package_of, relative

HTTP_LAYER = (
    "app",
    "body",
    "call",
    "control",
    "infer",
    "metrics",
    "protocol",
    "settings",
    "shared_tensors",
    "shm",
    "shm_cuda",
    "shm_driver",
    "shm_openers",
    "shm_routes",
    "shm_system",
    "stats",
    "status",
    "traffic",
    "weights",
)
"""Modules of the service that run on the event loop and know tensors as bytes alone."""

SERIALIZERS = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
"""Whatever runs code, or crashes the interpreter, while it reads bytes from elsewhere."""

Rule = Callable[[Import], bool]


def http_layer() -> list[Path]:
    return [SERVICE / f"{name}.py" for name in HTTP_LAYER]


def service_modules(flashinfer: bool) -> list[Path]:
    """The service's files that may import flashinfer, or the others."""
    adapters = set((SERVICE / "backends").glob("flashinfer_*.py"))
    return [path for path in modules(SERVICE) if (path in adapters) == flashinfer]


def broken(rule: Rule, files: list[Path]) -> list[str]:
    return [
        f"{relative(path)}:{found.line} imports {found.name}"
        for path in files
        for found in imports(path.read_text(), package_of(path))
        if rule(found)
    ]


def beyond_wire(found: Import) -> bool:
    return found.of("gemmwire") and not found.of("gemmwire.wire")


def heavy_at_import(found: Import) -> bool:
    return found.scope == "module" and (found.of("torch") or found.of("numpy") or found.of("ml_dtypes"))


def serializer(found: Import) -> bool:
    return any(found.of(name) for name in SERIALIZERS)


def test_the_client_never_imports_the_service() -> None:
    """Guards: `pip install gemmwire` that needs torch and fastapi after all."""
    assert broken(lambda found: found.of("gemmwire_service"), modules(CLIENT)) == []


def test_the_service_knows_only_the_wire_of_the_client() -> None:
    """Guards: a change of the SDK that changes the server."""
    assert broken(beyond_wire, modules(SERVICE)) == []


# Modules for PyTorch users, who import them by name: nothing else of the client may.
FOR_TORCH = {"gemmwire.nn"}


def test_the_client_imports_torch_and_numpy_only_where_a_call_needs_them() -> None:
    """Guards: an `import gemmwire` of seconds."""
    light = [path for path in modules(CLIENT) if CLIENT / "nn" not in path.parents]
    assert broken(heavy_at_import, light) == []
    assert broken(lambda found: found.of(*FOR_TORCH), light) == []


def test_torch_stays_out_of_the_http_layer() -> None:
    """Guards: device work on the event loop, where it delays every other request."""
    assert broken(lambda found: found.of("torch"), http_layer()) == []


def test_flashinfer_is_imported_by_its_backends_alone() -> None:
    """Guards: a server that does not start where FlashInfer is not installed."""
    assert broken(lambda found: found.of("flashinfer"), service_modules(flashinfer=False)) == []


def test_flashinfer_is_imported_inside_functions() -> None:
    """Guards: an import of minutes (FlashInfer compiles and probes the GPU) to learn a backend's name."""
    files = service_modules(flashinfer=True)
    assert broken(lambda found: found.of("flashinfer") and found.scope != "function", files) == []


def test_ray_is_imported_by_its_application_alone() -> None:
    """Guards: a server that does not start where Ray is not installed."""
    files = [path for path in modules(SERVICE) if path != SERVICE / "ray.py"]
    assert broken(lambda found: found.of("ray"), files) == []


def test_nothing_reads_a_format_that_runs_code() -> None:
    """Guards: a checkpoint or a request body that executes what it carries."""
    everywhere = [ROOT / name for name in ("client", "service", "tests", "bench", "examples")]
    assert broken(serializer, modules(*everywhere)) == []


def test_packages_raise_instead_of_asserting() -> None:
    """Guards: a check of input that `python -O` removes, and an AssertionError without a way out."""
    asserts = [
        f"{relative(path)}:{node.lineno}"
        for path in modules(CLIENT, SERVICE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


@pytest.mark.parametrize(
    ("source", "name", "scope"),
    [
        pytest.param("import torch.nn as nn", "torch.nn", "module", id="alias"),
        pytest.param("from gemmwire import Client", "gemmwire.Client", "module", id="from-package"),
        pytest.param("from . import wire", "gemmwire.wire", "module", id="relative"),
        pytest.param("from ..a import b", "a.b", "module", id="relative-to-the-parent"),
        pytest.param("try:\n import torch\nexcept ImportError: pass", "torch", "module", id="try"),
        pytest.param("class A:\n import torch", "torch", "module", id="class-body"),
        pytest.param("def f():\n import torch", "torch", "function", id="function"),
        pytest.param("async def f():\n if x:\n  import torch", "torch", "function", id="nested-in-coroutine"),
        pytest.param("if TYPE_CHECKING:\n import torch", "torch", "typing", id="typing"),
        pytest.param("if TYPE_CHECKING: pass\nelse:\n import torch", "torch", "module", id="not-typing"),
        pytest.param("importlib.import_module('pickle')", "pickle", "module", id="import_module"),
        pytest.param("f = lambda: __import__('pickle')", "pickle", "function", id="__import__"),
    ],
)
def test_an_import_is_seen_in_every_disguise(source: str, name: str, scope: str) -> None:
    """Guards: rules that hold because the reader of the ASTs overlooks what they forbid."""
    assert [(found.name, found.scope) for found in imports(source, "gemmwire")] == [(name, scope)]
