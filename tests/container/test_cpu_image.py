"""The image of the CPU as `docker compose up` runs it: it serves, may do nothing else, and stops."""

from __future__ import annotations

import http.client
import platform
import sys
from threading import Thread

import numpy as np
import pytest

import gemmwire
from composed import Container
from docker_host import Docker

pytestmark = [pytest.mark.container, pytest.mark.timeout(3600)]

LARGEST = 1_300_000_000  # bytes
COMPILERS = ("as", "c++", "cc", "clang", "cpp", "g++", "gcc", "ld", "make", "ninja", "nvcc")
X = np.random.default_rng(0).standard_normal((4, 128), dtype=np.float32)
LAYER = "demo.blocks.0.attn.W_K"


def test_it_is_small(engine: Docker, image: str) -> None:
    """Guards: a compiler, a cache of pip or torch's CUDA build in what everybody pulls."""
    size = engine.inspect(image)["Size"]
    print(f"{image}: {size / 1e6:.0f} MB", file=sys.stderr)
    assert size <= LARGEST


def test_it_serves_the_demo_on_this_machine_alone(container: Container) -> None:
    y = gemmwire.Client(f"http://127.0.0.1:{container.port}").infer(LAYER, X)
    assert y.shape == (4, 64)
    published = container.docker.inspect(container.name)["NetworkSettings"]["Ports"]
    assert [bound["HostIp"] for bound in published["8000/tcp"]] == ["127.0.0.1"]


def test_it_runs_as_nobody_who_may_do_anything(container: Container) -> None:
    """Guards: root in the container, a capability, or a way to gain one."""
    assert container.inside("id", "-u").strip() == "10001"
    status = container.inside("cat", "/proc/self/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (int(facts["CapEff"], 16), int(facts["CapBnd"], 16), facts["NoNewPrivs"]) == (0, 0, "1")


@pytest.mark.parametrize("folder", ["/", "/etc", "/models", "/opt/gemmwire/bin", "/var"])
def test_what_it_is_made_of_cannot_be_written(container: Container, folder: str) -> None:
    assert "Read-only file system" in container.inside("touch", f"{folder}/new", check=False)


@pytest.mark.parametrize("folder", ["/tmp", "/var/cache/gemmwire"])
def test_what_it_needs_to_write_can_be_written(container: Container, folder: str) -> None:
    """Guards: caches that cannot be kept by a user who is not root."""
    container.inside("sh", "-c", f"echo 1 > {folder}/new && rm {folder}/new")


def test_what_a_compiler_would_make_is_in_it(container: Container) -> None:
    """Guards: an image that quantizes by fourteen operators, since it has no compiler."""
    if platform.machine() != "x86_64":
        pytest.skip("it is compiled for levels of x86-64")
    code = "from gemmwire_service.compiled import SOURCES, _baked; print(*map(_baked, SOURCES), len(SOURCES))"
    *found, count = container.inside("python", "-c", code).split()
    assert [path.endswith(".so") for path in found] == [True] * int(count)


def test_there_is_no_compiler_in_it(container: Container) -> None:
    found = container.inside(
        "sh", "-c", f"for name in {' '.join(COMPILERS)}; do command -v $name; done; true"
    )
    assert found.split() == []


def test_nothing_of_the_build_is_left_in_it(engine: Docker, container: Container, image: str) -> None:
    """Guards: an index with a password in an image that is pushed."""
    told = engine.run("history", "--no-trunc", image) + container.inside("env")
    assert "PIP_" not in told
    assert "No such file" in container.inside("cat", "/etc/pip.conf", check=False)


def test_the_health_check_sees_a_service_that_is_not_there(container: Container) -> None:
    """Guards: healthy, whatever happens."""
    ask = "python -m gemmwire_service.healthcheck; echo status $?"
    assert container.inside("sh", "-c", ask).strip() == "status 0"
    said = container.inside("sh", "-c", f"GEMMWIRE_PORT=9 {ask}")
    assert said.splitlines()[-1] == "status 1"
    assert "no answer from 127.0.0.1:9" in said


def test_a_stop_answers_what_is_under_way_and_ends_with_0(container: Container) -> None:
    """Guards: a deployment that breaks requests. The last test: it stops the service."""
    body = json_body()
    link = http.client.HTTPConnection("127.0.0.1", container.port, timeout=30)
    link.putrequest("POST", f"/v2/models/{LAYER}/infer")
    link.putheader("content-length", str(len(body)))
    link.putheader("content-type", "application/json")
    link.endheaders(body[:20])
    stopping = Thread(target=container.docker.run, args=("stop", container.name))
    stopping.start()
    wait_until_closed(container)
    link.send(body[20:])
    assert link.getresponse().status == 200
    stopping.join()
    state = container.state()
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


def json_body() -> bytes:
    values = ", ".join(["1.0"] * 128)
    tensor = f'{{"name": "x", "shape": [1, 128], "datatype": "FP32", "data": [{values}]}}'
    return f'{{"inputs": [{tensor}]}}'.encode()


def wait_until_closed(container: Container) -> None:
    """Until the service refuses connections, as it does once it was told to stop."""
    while not container.inside("python", "-m", "gemmwire_service.healthcheck", check=False):
        pass
