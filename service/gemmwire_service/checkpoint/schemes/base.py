"""What a scheme says about the weights of a checkpoint, and how its lists of modules are matched."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

import regex

from gemmwire_service.checkpoint.base import shown
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

PATIENCE_S = 30.0  # for all modules of a list of expressions; a million matches take a second or two

Match = Callable[[str], str | None]
"""Module name -> the entry of a list that names it, or None."""


def nothing(module: str) -> str | None:
    """A list that names no module."""
    return None


@dataclass(frozen=True)
class Scheme:
    """How one checkpoint stores the quantized weights of its linear layers.

    name: for people. scales: the last part of the name of a weight's scales, whichever of them is there.
    block: rows and columns of the weight under one scale. declared: whether a config says all this.
    float_scales: scales may be F32 numbers, each an exact power of two. excluded: the entry of the list of
    modules left unquantized that names a module. other: the name of another quantization that a module has.
    """

    name: str
    scales: tuple[str, ...] = ("weight_scale",)
    block: tuple[int, int] = (1, BLOCK)
    declared: bool = True
    float_scales: bool = False
    excluded: Match = field(default=nothing, compare=False)
    other: Match = field(default=nothing, compare=False)
    notes: tuple[str, ...] = ()


UNDECLARED = Scheme("no declaration", declared=False)
"""Nothing is declared: float weights, or the plainest form of MXFP8, told by its names and dtypes."""


def names(declared: Any, source: object, key: str) -> tuple[str, ...]:
    """A list of module names in a config; absent and null are empty. Raises CheckpointError."""
    if declared is None:
        return ()
    if not isinstance(declared, list) or not all(isinstance(each, str) for each in declared):
        raise CheckpointError(
            f"{source}: {key} is {repr(declared)[:80]}; it lists module names",
            expected="a list of strings",
            got=repr(declared)[:80],
        )
    return tuple(declared)


def text(declared: Any) -> str:
    """A declared word, for comparison: its case is no difference."""
    return str(declared).lower()


def globs(patterns: Iterable[str]) -> Match:
    """Shell patterns over whole module names; one also names what is below it."""
    listed = tuple(patterns)
    if not listed:
        return nothing
    compiled = [(each, re.compile(translate(each))) for each in listed]

    def match(module: str) -> str | None:
        return next(
            (
                each
                for each, pattern in compiled
                if pattern.match(module) or module.startswith(each.rstrip("*.") + ".")
            ),
            None,
        )

    return match


def regexes(entries: Iterable[str], source: object) -> Match:
    """Names, or `re:` and an expression matched from the beginning, as compressed-tensors has them.

    Some expressions take longer than the age of the world over a name of forty letters. Matching raises
    CheckpointError once all of it has taken PATIENCE_S.
    """
    exact = {each for each in entries if not each.startswith("re:")}
    compiled = [(each, _compile(each[3:], source)) for each in entries if each.startswith("re:")]
    left = PATIENCE_S

    def match(module: str) -> str | None:
        nonlocal left
        if module in exact:
            return module
        for each, pattern in compiled:
            began = time.monotonic()
            try:
                if pattern.match(module, timeout=max(left, 1e-3)) is not None:
                    return each
            except TimeoutError:
                raise _endless(each, module, source) from None
            finally:
                left -= time.monotonic() - began
        return None

    return match


def parts(entries: Iterable[str]) -> Match:
    """Names of modules or of parts of their path, as transformers' modules_to_not_convert has them."""
    listed = tuple(entries)

    def match(module: str) -> str | None:
        dotted = f".{module}."
        return next((each for each in listed if f".{each.strip('.')}." in dotted), None)

    return match


def _compile(expression: str, source: object) -> regex.Pattern[str]:
    """What `re` takes, which is what such lists are written for, in a form whose matching can be stopped."""
    try:
        re.compile(expression)
        return regex.compile(expression)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{source}: lists {shown('re:' + expression)}, which is no regular expression: {error}",
            got=expression[:80],
        ) from None


def _endless(entry: str, module: str, source: object) -> CheckpointError:
    return CheckpointError(
        f"{source}: lists {shown(entry)}, and to match it with {shown(module)} takes more than "
        f"{PATIENCE_S:g} seconds; write it without a repetition inside a repetition, or name the modules",
        expected="an expression that can be matched",
        got=entry[:80],
    )
