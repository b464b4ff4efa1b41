"""What the files themselves must be, whatever they do: readable, portable, complete."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_tree import CLIENT, PACKAGES, ROOT, SERVICE, modules, own_files, relative

MOST_FUNCTION_LINES = 60
MOST_FILE_LINES = 400

BINARY = {".npz", ".npy", ".png", ".ico", ".gz", ".safetensors", ".bin"}

NON_ASCII = frozenset("├└│─┬┴┐┌┘┤→←↔▸≤≥≈±·…°²³\u00d7\u00b5\u03c3")
"""What is meant where it stands: drawings and arithmetic (the escapes are times, micro and sigma, which have
look-alikes). Curly quotes and invisible characters are not."""

# Assembled, so that this file does not hold what it looks for.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
    )
]
LOCAL_PATH = re.compile(r"(?<![\w.*-])/(?:work|root|home|Users|opt/wheels|opt/pypi|tmp/\w+)(?![\w-])")


def lines() -> Iterator[tuple[str, str]]:
    """(place, text) of every line of every text file."""
    for path in own_files():
        if path.suffix not in BINARY:
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                yield f"{relative(path)}:{number}", text


def surprises(text: str) -> list[str]:
    return [
        f"U+{ord(character):04X} {unicodedata.name(character, 'unnamed')}"
        for character in text
        if not (character.isascii() and (character.isprintable() or character == "\t"))
        and character not in NON_ASCII
    ]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, with the lines of those inside it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_registry_is_written_into_the_tree() -> None:
    """Guards: an installation that ignores the index its machine is configured for."""
    assert [place for place, text in lines() for host in REGISTRIES if host in text] == []


def test_no_path_of_one_machine_is_written_into_the_tree() -> None:
    """Guards: a test or a page that works where it was written."""
    assert [f"{place} {found[0]}" for place, text in lines() if (found := LOCAL_PATH.search(text))] == []


def test_no_character_surprises() -> None:
    """Guards: code that does not read as it runs: look-alikes, bidirectional controls, false spaces."""
    assert [f"{place} {found}" for place, text in lines() if (found := surprises(text))] == []


def test_files_are_short() -> None:
    """Guards: the file that nobody reads whole. Split it by noun."""
    sizes = {relative(path): len(path.read_text().splitlines()) for path in modules(*PACKAGES)}
    assert {path: size for path, size in sizes.items() if size > MOST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    """Guards: the function that does three things. Name the parts."""
    found = [
        f"{relative(path)} {name}: {size} lines"
        for path in modules(*PACKAGES)
        for name, size in functions(path)
        if size > MOST_FUNCTION_LINES
    ]
    assert found == []


def test_the_license_is_there_whole_and_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_types_are_shipped(package: Path) -> None:
    """Guards: annotations that a user's type checker does not see."""
    assert (package / "py.typed").is_file()


@pytest.mark.parametrize("folder", [CLIENT.parent, SERVICE.parent], ids=lambda path: path.name)
def test_source_roots_are_no_packages(folder: Path) -> None:
    """Guards: `import client.gemmwire`, a second copy of every class, whose isinstance checks fail."""
    assert not (folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("zero\u200bwidth", id="zero-width-space"),
        pytest.param("right\u202eto left", id="bidi-override"),
        pytest.param("no\u00a0break", id="no-break-space"),
        pytest.param("\u0440ath", id="cyrillic-er"),
        pytest.param("it\u2019s", id="curly-quote"),
        pytest.param("\x1b[31m", id="escape"),
    ],
)
def test_a_surprise_is_seen(text: str) -> None:
    assert len(surprises(text)) == 1


@pytest.mark.parametrize(
    ("text", "local"),
    [
        pytest.param("open('/ho" "me/me/x')", True, id="home"),
        pytest.param("/tm" "p/x", True, id="temporary"),
        pytest.param("POST /v2/repository", False, id="route"),
        pytest.param("https://example.invalid/home", False, id="address"),
        pytest.param("client/work", False, id="relative"),
    ],
)  # fmt: skip
def test_a_local_path_is_seen(text: str, local: bool) -> None:
    assert bool(LOCAL_PATH.search(text)) is local
