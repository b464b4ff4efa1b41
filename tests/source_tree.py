"""The repository as the gate tests see it: where things are, which files are its own, what a file imports."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "gemmwire"
SERVICE = ROOT / "service" / "gemmwire_service"
PACKAGES = (CLIENT, SERVICE)

Scope = Literal["module", "function", "typing"]


@dataclass(frozen=True)
class Import:
    """One imported dotted name: `from a import b` is `a.b`, and a relative import has its full name."""

    name: str
    line: int
    scope: Scope

    def of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


@cache
def own_files() -> tuple[Path, ...]:
    """Every file that git tracks or would add: no environments, caches or build outputs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = (ROOT / name for name in sorted(set(listed.split("\0")) - {""}))
    return tuple(path for path in files if path.is_file())


def modules(*folders: Path) -> list[Path]:
    """The Python files under `folders`, which must hold some: a rule over no files guards nothing."""
    found = [path for path in own_files() if path.suffix == ".py" and any(f in path.parents for f in folders)]
    if not found:
        raise FileNotFoundError(f"no Python file under {', '.join(map(str, folders))}")
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    """The dotted package that a relative import in `path` starts from."""
    return ".".join(path.parent.relative_to(ROOT).parts[1:])


def dev_script(path: Path = ROOT / "dev") -> ModuleType:
    """The ./dev script as a module; it has no .py to be imported by."""
    loader = SourceFileLoader("dev_script", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module


def script(path: Path) -> ModuleType:
    """A program of the repository as a module, with its `main`."""
    loader = SourceFileLoader(f"script_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module


def written(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` in the lines between `begin` and `end`."""
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
    assert len(pattern.findall(page)) == 1, f"the page needs the lines {begin} and {end}, once"
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of `source`, also `import_module("x")` and `__import__("x")`, each with its scope."""
    yield from _imports(ast.parse(source), package, "module")


def _imports(node: ast.AST, package: str, scope: Scope) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner = _scope(child, node, scope)
        for name in _names(child, package):
            yield Import(name, getattr(child, "lineno", 0), inner)
        yield from _imports(child, package, inner)


def _scope(child: ast.AST, parent: ast.AST, scope: Scope) -> Scope:
    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return "function"
    in_else = isinstance(parent, ast.If) and child in parent.orelse
    if isinstance(parent, ast.If) and not in_else and ast.unparse(parent.test).endswith("TYPE_CHECKING"):
        return "typing"
    return scope


def _names(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function, argument = ast.unparse(node.func), node.args[0].value
        if isinstance(argument, str) and function.split(".")[-1] in ("import_module", "__import__"):
            return [argument]
    return []
