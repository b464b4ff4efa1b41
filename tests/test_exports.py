"""`__all__` of every package against what the package binds: the two drift apart one import at a time."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from source_tree import CLIENT, SERVICE, modules, package_of

PACKAGES = [path for path in modules(CLIENT, SERVICE) if path.name == "__init__.py"]


def isort_key(name: str) -> tuple[int, str]:
    """The order that ruff (RUF022) writes: constants, classes, the rest."""
    constant = len(name) > 1 and name.isupper()
    return (0 if constant else 1 if name[:1].isupper() else 2), name


def public_names(source: str, package: str) -> set[str]:
    """What a package's `__init__` offers: the public names that it defines, and those that it takes from its
    own modules (typing blocks too) without using them itself."""
    tree = ast.parse(source)
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    names: set[str] = set()
    statements = list(tree.body)
    while statements:
        node = statements.pop()
        if isinstance(node, (ast.If, ast.Try)):
            statements += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        names |= set(_defined_by(node)) | (set(_taken_by(node, package)) - used)
    return {name for name in names if not name.startswith("_")}


def _defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _taken_by(node: ast.stmt, package: str) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(package)):
        return [alias.asname or alias.name for alias in node.names]
    return []


@pytest.mark.parametrize("path", PACKAGES, ids=package_of)
def test_all_names_what_the_package_offers(path: Path) -> None:
    """Guards: a public name that the docs and type checkers do not see, or one that is gone."""
    package = importlib.import_module(package_of(path))
    submodules = {file.stem for file in path.parent.iterdir()}
    public = public_names(path.read_text(), package_of(path)) - submodules
    exported = list(getattr(package, "__all__", []))

    assert public - set(exported) == set(), "bound and public, but not in __all__"
    assert [name for name in exported if not hasattr(package, name)] == [], "in __all__, but not there"
    assert exported == sorted(set(exported), key=isort_key)


def test_the_client_exports_something() -> None:
    """Guards: lists that agree because both are empty."""
    assert {"Client", "__version__"} <= set(importlib.import_module("gemmwire").__all__)


def test_public_names_are_read_from_lazy_and_plain_exports() -> None:
    """Guards: a completeness check that passes because it overlooks how a package exports."""
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from gemmwire.client import Client\n"
        "from .errors import GemmwireError as Error, ForOwnUse, _hidden\n"
        "LIMIT: int = 3\nname = ForOwnUse()\ndef call(): ...\nclass Kind: ...\n"
    )
    assert public_names(source, "gemmwire") == {"Client", "Error", "LIMIT", "name", "call", "Kind"}
