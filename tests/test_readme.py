"""The pages run: Python blocks against a live server; command lines are held against the tools they call.

In a page's Python the address 127.0.0.1:8000, where `./dev serve` listens, stands for the test's
server. A block that cannot run here says so and why on its fence: ```python skip="needs a GPU".
"""

from __future__ import annotations

import os
import re
import shlex
from codeop import compile_command
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gemmwire.cli.command import parser as client_parser
from gemmwire_service import new_key
from gemmwire_service.accuracy import command as accuracy
from gemmwire_service.doctor.command import parser
from gemmwire_service.errors import SettingsError
from gemmwire_service.quantize import command as quantize
from gemmwire_service.ray_arguments import read_arguments
from gemmwire_service.settings import load
from serving import Served
from source_tree import ROOT, dev_script, relative

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "127.0.0.1:8000"
SHELL = {"sh", "bash", "console"}
NOT_RUN = {"text", "json", "yaml", "toml", "http", "dockerfile", "promql", "diff"}
FENCE = re.compile(r'^```(?P<language>\w*)(?: skip="(?P<skip>[^"]+)")?\n(?P<code>.*?)^```$', re.M | re.S)


@dataclass(frozen=True)
class Block:
    path: Path
    line: int
    language: str
    code: str
    skip: str | None

    @property
    def place(self) -> str:
        return f"{relative(self.path)}:{self.line}"


def blocks(path: Path, text: str) -> list[Block]:
    """The fenced blocks of a page; `line` is the first of the code."""
    return [
        Block(
            path,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["skip"],
        )
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for path in PAGES for block in blocks(path, path.read_text())]


def commands(block: Block) -> list[str]:
    """The command lines of a shell block: comments, prompts and continuations taken away, and in a console
    block the output too."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


# How a command line is checked without being run: its words after the name, and the variables before it.

Check = Callable[[list[str], dict[str, str]], None]


def check_serve(words: list[str], variables: dict[str, str]) -> None:
    if words[:1] == ["check"]:
        parser(variables).parse_args(words[1:])
        return
    if words[:1] == ["key"]:
        new_key.parser().parse_args(words[1:])
        return
    if words[:1] == ["quantize"]:
        quantize.parser().parse_args(words[1:])
        return
    if words[:1] == ["accuracy"]:
        accuracy.parser().parse_args(words[1:])
        return
    with patch.dict(os.environ, variables):
        settings = load([word for word in words if word != "&"])
    settings.sources()
    settings.random_layers()


def check_client(words: list[str], variables: dict[str, str]) -> None:
    client_parser().parse_args(words)


def check_dev(words: list[str], variables: dict[str, str]) -> None:
    if words[0] == "serve":
        check_serve(words[1:], variables)
    elif words[0] == "bench" and words[1:]:
        check_file([f"bench/{words[1]}.py"], variables)
    elif words[0] == "python":
        check_file(words[1:], variables)
    else:
        assert words[0] in (*dev_script().COMMANDS, "--help")


def check_make(words: list[str], variables: dict[str, str]) -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(" ".join(targets).split())


def check_pip(words: list[str], variables: dict[str, str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = {extra for word in words for extra in re.findall(r"^(?:gemmwire|\.)\[(.*)\]$", word)}
    assert [extra for name in extras for extra in name.split(",") if f"\n{extra} = [" not in project] == []


def check_file(words: list[str], variables: dict[str, str]) -> None:
    if words and words[0] not in ("-c", "-m"):
        assert (ROOT / words[0]).is_file()


def check_ray_serve(words: list[str], variables: dict[str, str]) -> None:
    assert words[0] in ("run", "deploy", "status")
    if words[1:2] == ["gemmwire_service.ray:app"]:
        read_arguments(dict(word.split("=", 1) for word in words[2:]))
    else:
        check_file(words[1:], variables)


def unchecked(words: list[str], variables: dict[str, str]) -> None:
    """A tool of others, whose arguments are its own."""


CHECKS: dict[str, Check] = {
    "gemmwire-serve": check_serve,
    "gemmwire": check_client,
    "./dev": check_dev,
    "make": check_make,
    "pip": check_pip,
    "python": check_file,
    "serve": check_ray_serve,
    ".ci/run": unchecked,
    **dict.fromkeys(("git", "cd", "curl", "docker", "export", "kill", "ls", "apt-get"), unchecked),
}


def split(line: str) -> tuple[str, list[str], dict[str, str]]:
    """`A=1 tool --flag` is ("tool", ["--flag"], {"A": "1"})."""
    words = shlex.split(line, comments=True)
    variables: dict[str, str] = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return words[0], words[1:], variables


# The tests.


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_python_blocks_run_in_order(path: Path, server: Served) -> None:
    """Guards: a first screen that raises. One namespace a page, as a reader's session has."""
    runnable = [
        block for block in BLOCKS if block.path == path and block.language == "python" and not block.skip
    ]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in runnable:
        # Blank lines before the code make a traceback name the page's own line.
        code = "\n" * (block.line - 1) + block.code.replace(ADDRESS, f"127.0.0.1:{server.port}")
        exec(compile(code, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_python_blocks_can_be_pasted_into_a_session(path: Path) -> None:
    """Guards: a SyntaxError where a statement follows an indented block without a blank line between."""
    for block in BLOCKS:
        if block.path == path and block.language == "python":
            begun = ""
            for line in (*block.code.splitlines(), ""):
                begun += line + "\n"
                if compile_command(begun, block.place) is not None:  # the line has ended a statement
                    begun = ""
            assert not begun.strip(), f"{block.place} ends in the middle of a statement"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_blocks_that_cannot_run_here_say_why(path: Path) -> None:
    """Guards: a block that nobody runs and nobody knows of."""
    left_out = [f"{block.place}: {block.skip}" for block in BLOCKS if block.path == path and block.skip]
    if left_out:
        pytest.skip("; ".join(left_out))


@pytest.mark.parametrize(
    ("block", "line"),
    [
        pytest.param(block, line, id=f"{block.place}: {line}")
        for block in BLOCKS
        if block.language in SHELL
        for line in commands(block)
    ],
)
def test_command_lines_are_right(block: Block, line: str) -> None:
    """Guards: an option that was renamed, a script that was moved, an extra that is not there."""
    tool, words, variables = split(line)
    assert tool in CHECKS, f"{block.place}: teach CHECKS how {tool} is checked"
    CHECKS[tool](words, variables)


def test_every_block_is_of_a_known_kind() -> None:
    """Guards: a block that no test reads because its language is misspelt."""
    known = {"python", *SHELL, *NOT_RUN}
    assert [f"{block.place} {block.language!r}" for block in BLOCKS if block.language not in known] == []


def test_every_fence_is_read() -> None:
    """Guards: a block that the pattern misses, because its fence is indented or has words of its own."""
    fences = {relative(path): len(re.findall(r"^\s*(?:```|~~~)", path.read_text(), re.M)) for path in PAGES}
    read = {relative(path): 2 * sum(block.path == path for block in BLOCKS) for path in PAGES}
    assert fences == read


def test_the_readme_shows_both_ends() -> None:
    """Guards: the tests above, passing because the page has nothing to run."""
    languages = {block.language for block in BLOCKS if block.path.name == "README.md" and not block.skip}
    assert "python" in languages
    assert languages & SHELL


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("gemmwire-serve --prt 9000", id="unknown-flag"),
        pytest.param("gemmwire infer http://h m.l", id="no-input"),
        pytest.param("GEMMWIRE_PORT=nine ./dev serve", id="bad-variable"),
        pytest.param("gemmwire-serve --random-layer try=4096", id="bad-value"),
        pytest.param("gemmwire-serve check --jsn", id="unknown-flag-of-check"),
        pytest.param("gemmwire-serve quantize a b --format gguf", id="unknown-format-of-quantize"),
        pytest.param("gemmwire-serve accuracy a --fail-on fine", id="unknown-bound-of-accuracy"),
        pytest.param("./dev bench nothing", id="no-such-bench"),
        pytest.param("./dev run", id="no-such-command"),
        pytest.param("make run", id="no-such-target"),
        pytest.param('pip install "gemmwire[everything]"', id="no-such-extra"),
        pytest.param("python examples/nothing.py", id="no-such-file"),
    ],
)
def test_a_wrong_command_line_is_seen(line: str) -> None:
    tool, words, variables = split(line)
    with pytest.raises((AssertionError, SettingsError, SystemExit)):
        CHECKS[tool](words, variables)
