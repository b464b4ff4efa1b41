"""gemmwire beside the servers that one would write or take instead, on this machine.

    ./dev bench peers            # needs a C compiler; installs the peers into .venv-peers at first use
    ./dev bench peers --only gemmwire,asgi_gemm --rounds 3
    ./dev bench peers --write    # the table in README.md and docs/peers.svg, too

Every server computes the same y = x @ W.T in BF16, on one thread where its row does not say otherwise;
gemmwire quantizes x on top of that, and speaks its whole protocol. One closed-loop load generator in C
(loadgen.c) with keep-alive connections is the client of all of them. The rounds are interleaved: each server
is measured once a round, the medians are shown. Beside p50 and rate stands the ratio to a bare ASGI app.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from _peers_chart import BARE, OTHER, OURS, Bar, Panel, chart
from figures.page import replaced
from figures.page import table as rows_of

ROOT = Path(__file__).resolve().parent.parent
PEERS_VENV = ROOT / ".venv-peers"
PACKAGES = ("torch", "numpy", "fastapi", "uvicorn[standard]", "mosec", "litserve", "ray[serve]", "bentoml")
READY_S = 90
REFERENCE = "asgi_gemm"
CLIENTS = ("sdk", "tritonclient")  # of gemmwire, in Python; no servers
RPC = "torch_rpc"  # which is no HTTP, and so its own client


INFER = "/v2/models/bench/infer"


@dataclass(frozen=True)
class Peer:
    """A server: bench/peers/`name`.py, or gemmwire itself. `form` is how it takes x."""

    name: str
    title: str
    form: str = "raw"
    path: str = "/"
    arguments: tuple[str, ...] = ()
    threads: int = 1


PEERS = (
    Peer("gemmwire", "gemmwire, binary OIP, one thread", "oip", INFER, ("--cpu-threads", "1")),
    Peer("gemmwire_default", "the same by default: long forwards on all cores", "oip", INFER),
    Peer("sdk", "gemmwire, by its SDK"),
    Peer("tritonclient", "gemmwire, by tritonclient, FP32"),
    Peer("gemmwire_asgi", "the same, --no-fast-path", "oip", INFER, ("--cpu-threads", "1", "--no-fast-path")),
    Peer("asgi_echo", "bare ASGI echo, no GEMM"),
    Peer("asgi_gemm", "bare ASGI + GEMM"),
    Peer("asgi_gemm_two", "bare ASGI + GEMM on two threads", threads=2),
    Peer("fastapi_raw", "FastAPI, raw bytes"),
    Peer("fastapi_json", "FastAPI, JSON lists", "json"),
    Peer("mosec_raw", "mosec", path="/inference"),
    Peer("litserve_raw", "LitServe, base64 in JSON", "base64", "/infer"),
    Peer("ray_raw", "Ray Serve"),
    Peer("bentoml_raw", "BentoML", "multipart", "/infer"),
    Peer(RPC, "torch.distributed.rpc, its own client"),
)


@dataclass(frozen=True)
class Cell:
    """A column of the table: x [m, k], W [n, k], so many clients."""

    m: int
    n: int
    k: int
    clients: int

    @property
    def title(self) -> str:
        return f"M={self.m}, {'one client' if self.clients == 1 else f'{self.clients} clients'}"


CELLS = tuple(
    Cell(m, n, k, clients)
    for m, n, k in ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 1024), (2048, 64, 4096))
    for clients in (1, 8)
)


@dataclass(frozen=True)
class Result:
    p50_ms: float
    p99_ms: float
    per_second: float


def request(peer: Peer, cell: Cell) -> bytes:
    """A whole HTTP request with Gaussian x."""
    x = torch.randn(cell.m, cell.k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data = x.view(torch.uint8).numpy().tobytes()
    fields = {"Host": "localhost", "Content-Type": "application/octet-stream"}
    if peer.form == "json":
        data = json.dumps({"x": x.tolist()}).encode()
        fields["Content-Type"] = "application/json"
    elif peer.form == "base64":
        data = json.dumps({"x": base64.b64encode(data).decode()}).encode()
        fields["Content-Type"] = "application/json"
    elif peer.form == "multipart":
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        data = head + data + b"\r\n--b--\r\n"
        fields["Content-Type"] = "multipart/form-data; boundary=b"
    elif peer.form == "oip":
        data, fields["Inference-Header-Content-Length"] = oip(cell, data)
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {peer.path} HTTP/1.1\r\n{lines}Content-Length: {len(data)}\r\n\r\n".encode() + data


def oip(cell: Cell, data: bytes) -> tuple[bytes, str]:
    from gemmwire import wire

    x = wire.Tensor("x", "BF16", (cell.m, cell.k), data)
    headers, buffers = wire.encode_request(wire.InferRequest((x,), binary_outputs=True))
    return b"".join(buffers), headers[wire.HEADER_LENGTH]


# Servers.


@contextmanager
def server(peer: Peer, n: int, k: int) -> Iterator[int]:
    """-> the port that it answers at."""
    port = free_port()
    environment = surroundings(n, k, peer.threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(peer, port, n, k),
            cwd=ROOT / "bench" / "peers",
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(port, process, request(peer, Cell(1, n, k, 1)))
            yield port
        except RuntimeError as error:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"{peer.name}: {error}\n{tail}") from None
        finally:
            stop(process)


def surroundings(n: int, k: int, threads: int = 1) -> dict[str, str]:
    shape = {"GEMM_NK": f"{n}x{k}", "GEMM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return os.environ | shape | {"PYTHONUNBUFFERED": "1"}


def command(peer: Peer, port: int, n: int, k: int) -> list[str]:
    if peer.name.startswith("gemmwire"):
        layer = f"bench={n}x{k}"
        start = [sys.executable, "-m", "gemmwire_service", "--random-layer", layer, "--port", str(port)]
        return [*start, "--device", "cpu", *peer.arguments]
    return [str(PEERS_VENV / "bin" / "python"), f"{peer.name.removesuffix('_two')}.py", str(port)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes], first: bytes) -> None:
    """Until it answers a request with 200."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with status {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
                link.sendall(first)
                if link.recv(4096).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
                    return
        except OSError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"it did not answer with 200 within {READY_S} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


# Measuring.


def measure(loadgen: Path, port: int, cell: Cell, file: Path, seconds: float) -> Result | None:
    """None where the server does not answer as asked."""
    done = subprocess.run(
        [loadgen, "http", "127.0.0.1", str(port), str(cell.clients), str(seconds), file],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if "p50_ms" not in found or found["errs"] or found["bad"] or not found["n"]:
        print(f"  {cell.title}: no measurement: {done.stderr.strip()[-200:]} {found}", file=sys.stderr)
        return None
    return Result(found["p50_ms"], found["p99_ms"], found["rps"])


def measured(options: argparse.Namespace, loadgen: Path, folder: Path) -> dict[tuple[str, Cell], Result]:
    """The medians over the rounds, of each server and cell."""
    servers = [peer for peer in PEERS if peer.name not in (*CLIENTS, RPC)]
    asks_rpc = options.only is None or RPC in options.only.split(",")
    chosen = [peer for peer in servers if options.only is None or peer.name in options.only.split(",")]
    found: dict[tuple[str, Cell], list[Result]] = {}
    for n, k in dict.fromkeys((cell.n, cell.k) for cell in CELLS):
        cells = [cell for cell in CELLS if (cell.n, cell.k) == (n, k)]
        with ExitStack() as stack:
            ports = {}
            for peer in chosen:
                try:
                    ports[peer] = stack.enter_context(server(peer, n, k))
                except RuntimeError as error:
                    print(f"left out: {error}", file=sys.stderr)
            for number in range(options.rounds):
                print(f"W [{n}, {k}], round {number + 1} of {options.rounds}", file=sys.stderr)
                for cell in cells:
                    if asks_rpc and (row := rpc_row(cell, options.seconds)) is not None:
                        found.setdefault((RPC, cell), []).append(row)
                    for peer, port in ports.items():
                        file = folder / f"{peer.name}-{cell.m}-{cell.k}.http"
                        if not file.exists():
                            file.write_bytes(request(peer, cell))
                        result = measure(loadgen, port, cell, file, options.seconds)
                        if result is not None:
                            found.setdefault((peer.name, cell), []).append(result)
                        if peer.name == "gemmwire" and cell.clients == 1:
                            for name, row in client_rows(port, cell, options.seconds):
                                found.setdefault((name, cell), []).append(row)
    return {key: median(results) for key, results in found.items()}


def median(results: Sequence[Result]) -> Result:
    columns = zip(*((each.p50_ms, each.p99_ms, each.per_second) for each in results), strict=True)
    return Result(*(statistics.median(column) for column in columns))


def table(found: dict[tuple[str, Cell], Result]) -> str:
    head = ["server", *(cell.title for cell in CELLS)]
    there = [peer for peer in PEERS if any(name == peer.name for name, _ in found)]
    return rows_of(head, [[peer.title, *(entry(found, peer, cell) for cell in CELLS)] for peer in there])


def entry(found: dict[tuple[str, Cell], Result], peer: Peer, cell: Cell) -> str:
    """p50 for one client, the rate for several; and how many times the reference it is."""
    result, reference = found.get((peer.name, cell)), found.get((REFERENCE, cell))
    if result is None:
        return "-"
    if cell.clients == 1:
        shown, ratio = f"{result.p50_ms:.2f} ms", result.p50_ms / reference.p50_ms if reference else None
    else:
        shown, ratio = (
            f"{result.per_second:.0f}/s",
            result.per_second / reference.per_second if reference else None,
        )
    return shown if ratio is None else f"{shown} ({ratio:.2f})"


# What is kept of it.


def panel(found: dict[tuple[str, Cell], Result], cell: Cell) -> Panel:
    bars = []
    for peer in PEERS:
        result = found.get((peer.name, cell))
        if result is None:
            continue
        ours = peer.name.startswith("gemmwire") or peer.name in CLIENTS
        colour = OURS if ours else BARE if peer.name.startswith("asgi") else OTHER
        value = result.p50_ms if cell.clients == 1 else result.per_second
        bars.append(Bar(peer.title, value, entry(found, peer, cell), colour))
    better = "p50, shorter is better" if cell.clients == 1 else "answers a second, longer is better"
    return Panel(
        f"x [{cell.m}, {cell.k}], W [{cell.n}, {cell.k}], {cell.title.partition(', ')[2]}: {better}", bars
    )


def write(found: dict[tuple[str, Cell], Result], how: str) -> None:
    panels = [panel(found, cell) for cell in CELLS]
    rows = list(zip(panels[::2], panels[1::2], strict=True))
    (ROOT / "docs" / "peers.svg").write_text(chart(rows, f"{how}; in brackets the ratio to bare ASGI + GEMM"))
    page = ROOT / "README.md"
    page.write_text(replaced(page.read_text(), f"{how}:\n\n{table(found)}", "peers"))


# Python clients of gemmwire.


def client_rows(port: int, cell: Cell, seconds: float) -> Iterator[tuple[str, Result]]:
    """One request at a time from the SDK, and from an unmodified tritonclient."""
    import gemmwire

    x = torch.randn(cell.m, cell.k).to(torch.bfloat16)
    with gemmwire.Client(f"http://127.0.0.1:{port}") as client:
        yield "sdk", timed(lambda: client.infer("bench", x), seconds)
    yield from triton_rows(port, cell, seconds)


def triton_rows(port: int, cell: Cell, seconds: float) -> Iterator[tuple[str, Result]]:
    try:
        import tritonclient.http as triton
    except ImportError:
        return
    tensor = triton.InferInput("x", [cell.m, cell.k], "FP32")
    tensor.set_data_from_numpy(torch.randn(cell.m, cell.k).numpy())
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield "tritonclient", timed(lambda: client.infer("bench", [tensor]).as_numpy("y"), seconds)


def timed(call: Callable[[], object], seconds: float) -> Result:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    return Result(times[len(times) // 2], times[len(times) * 99 // 100], 1e3 * len(times) / sum(times))


# Peers that are no HTTP.


def rpc_row(cell: Cell, seconds: float) -> Result | None:
    """Both ends are started for it, and waited for."""
    script = [str(PEERS_VENV / "bin" / "python"), "-W", "ignore", f"{RPC}.py"]
    place = {"cwd": ROOT / "bench" / "peers", "env": surroundings(cell.n, cell.k), "text": True}
    port = str(free_port())
    asked = [str(size) for size in (cell.m, cell.k, cell.clients)]
    serving = subprocess.Popen([*script, "serve", port], **place)  # type: ignore[call-overload]
    try:
        asking = [*script, "ask", port, *asked, str(seconds)]
        done = subprocess.run(asking, stdout=subprocess.PIPE, timeout=READY_S, **place)  # type: ignore[call-overload]
        serving.wait(READY_S)
    except subprocess.TimeoutExpired:
        print(f"  {cell.title}: no measurement of {RPC}", file=sys.stderr)
        return None
    finally:
        serving.kill()
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout.strip().splitlines()[-1])
    times = sorted(found["times_ms"])
    return Result(times[len(times) // 2], times[len(times) * 99 // 100], found["per_second"])


# Set-up.


def build_loadgen(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("bench/peers.py: the load generator needs a C compiler (cc or gcc); install one")
    binary = folder / "loadgen"
    subprocess.run([compiler, "-O2", "-o", binary, ROOT / "bench" / "loadgen.c"], check=True)
    return binary


def install_peers() -> None:
    """Into an environment of their own: their requirements are not ours."""
    python = PEERS_VENV / "bin" / "python"
    stamp = PEERS_VENV / "installed"
    if stamp.exists():
        return
    print(f"bench/peers.py: installing {', '.join(PACKAGES)} into {PEERS_VENV}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", PEERS_VENV], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *PACKAGES], check=True
    )
    stamp.touch()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", help="names, separated by commas: " + ", ".join(peer.name for peer in PEERS)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--write", action="store_true", help="into README.md and docs/peers.svg")
    options = parser.parse_args(arguments)
    names = [peer.name for peer in PEERS] if options.only is None else options.only.split(",")
    if not all(name.startswith("gemmwire") for name in names):
        install_peers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measured(options, build_loadgen(folder), folder)
    how = f"{os.cpu_count()} cores, torch {torch.__version__}, medians of {options.rounds} interleaved rounds"
    print(how)
    print(table(found))
    if options.write:
        write(found, how)
    if options.json is not None:
        rows = [
            {"server": name, "m": c.m, "n": c.n, "k": c.k, "clients": c.clients} | vars(result)
            for (name, c), result in found.items()
        ]
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
