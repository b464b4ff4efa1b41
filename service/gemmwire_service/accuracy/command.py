"""The sub-command: its arguments, its order of work, its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gemmwire_service.checkpoint.base import listed
from gemmwire_service.progress import Progress
from gemmwire_service.terminated import terminated

from .calibration import Calibration
from .folder import opened
from .inputs import CAPTURED, synthetic
from .layer import LayerFigures, measure
from .page import page
from .report import Measured, document, text
from .source import Source
from .table import table
from .verdict import KEEP, LOOK, at_least

ROWS, ROWS_LIMIT = 128, 16384  # of each kind, a few numbers of FP64 for each element are in memory
JSON, PAGE = "accuracy.json", "accuracy.html"


def main(arguments: Sequence[str]) -> int:
    """Exit status 0; 1 where a layer's verdict is what --fail-on names, or worse.

    Errors: CheckpointError, OutputError; what was in the folder before is then as it was.
    """
    options = parser().parse_args(list(arguments))
    with terminated(), opened(options.out, (JSON, PAGE)) if options.out else nullcontext() as folder:
        found = document(_measure(options))
        if folder is not None:
            folder.write({JSON: text(found), PAGE: page(found)})
    print(text(found).rstrip() if options.json else table(found))
    if options.out:
        print(f"gemmwire-serve accuracy: {options.out / PAGE} and {JSON}", file=sys.stderr)
    return _status(found, options.fail_on)


def _measure(options: argparse.Namespace) -> Measured:
    source = Source(options.checkpoint, options.reference, options.layers)
    sizes = {name: source.checkpoint.spec(name).k for name in source.names}
    calibration = Calibration(options.calibrate, sizes) if options.calibrate else None
    notes = (*source.notes, *(calibration.notes if calibration else ()))
    for note in notes:
        print(f"gemmwire-serve accuracy: {note}", file=sys.stderr)
    layers = _layers(source, sizes, calibration, options)
    return Measured(
        checkpoint=str(options.checkpoint),
        reference=str(options.reference) if options.reference else None,
        calibration=str(options.calibrate) if options.calibrate else None,
        rows=options.rows,
        seed=options.seed,
        layers=layers,
        left=source.left,
        notes=notes,
    )


def _layers(
    source: Source, sizes: dict[str, int], calibration: Calibration | None, options: argparse.Namespace
) -> list[LayerFigures]:
    found = []
    with Progress("measuring", sum(map(source.nbytes, source.names)), len(source.names)) as progress:
        for name in source.names:
            inputs = synthetic(name, options.rows, sizes[name], options.seed)
            captured = calibration.rows(name, options.rows) if calibration else None
            if captured is not None:
                inputs[CAPTURED] = captured
            found.append(measure(source.read(name), inputs))
            progress.add(name, source.nbytes(name), layers=1)
    return found


def _status(found: dict[str, Any], bound: str | None) -> int:
    bad = [layer["name"] for layer in found["layers"] if bound and at_least(layer["verdict"], bound)]
    if bad:
        print(f"gemmwire-serve accuracy: --fail-on {bound}: {listed(bad)}", file=sys.stderr)
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="gemmwire-serve accuracy",
        description="Measure what MXFP8 costs each layer of CHECKPOINT, against the unquantized weight that "
        "is stored: its weight, and its answers to drawn and to captured rows of x.",
        allow_abbrev=False,
    )
    result.add_argument("checkpoint", type=_path, metavar="CHECKPOINT", help="as --model of gemmwire-serve")
    result.add_argument(
        "--reference",
        type=_path,
        metavar="MODEL",
        help="the unquantized model that an MXFP8 CHECKPOINT was made from",
    )
    result.add_argument(
        "--calibrate",
        type=_path,
        metavar="FILE",
        help="captured rows of x, a safetensors file as gemmwire.nn.capture writes it; they decide then",
    )
    result.add_argument(
        "--out", type=_path, metavar="FOLDER", help=f"write {JSON} and {PAGE}, a page to look at, into FOLDER"
    )
    result.add_argument(
        "--layers",
        action="append",
        default=[],
        metavar="PATTERN",
        help="layers to measure, such as '*.down_proj' (default: all); may be repeated",
    )
    result.add_argument(
        "--rows",
        type=_rows,
        default=ROWS,
        metavar="M",
        help=f"rows of x of each kind (default {ROWS}, at most {ROWS_LIMIT})",
    )
    result.add_argument("--seed", type=_seed, default=0, help="of the drawn rows (default 0)")
    result.add_argument("--json", action="store_true", help=f"print what {JSON} holds, not a table")
    result.add_argument(
        "--fail-on", choices=(LOOK, KEEP), help="exit with status 1 where a layer's verdict is that or worse"
    )
    return result


def _path(given: str) -> Path:
    if not given:
        raise argparse.ArgumentTypeError("no path is given; . is the folder that this is called in")
    return Path(given)


def _rows(given: str) -> int:
    value = _seed(given)
    if value == 0:
        raise argparse.ArgumentTypeError("0 rows measure nothing; at least 1 is needed")
    if value > ROWS_LIMIT:
        raise argparse.ArgumentTypeError(
            f"{value} rows are more than the {ROWS_LIMIT} that are measured at most; the figures of {ROWS} "
            "hardly differ"
        )
    return value


def _seed(given: str) -> int:
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise argparse.ArgumentTypeError(f"{given[:40]!r} is no whole number from 0 to 999999999")
    return int(given)
