"""The files that make the containers, read without docker, which would tell only whoever runs them.

./dev lint holds each to its own linter; here they are held to each other and to the service.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gemmwire_service import bake, server
from gemmwire_service.settings import load
from source_tree import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = ("docker-compose.yml", "docker-compose.gpu.yml")


def read(*names: str) -> dict[str, Any]:
    """Compose files merged as the Compose specification has it: mappings key by key, sequences one after the
    other, and of anything else the last counts."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = merge(merged, YAML(typ="safe").load(ROOT / name))
    return merged


def merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merge(base.get(key), over.get(key, base.get(key))) for key in {**base, **over}}
    if isinstance(base, list) and isinstance(over, list) and base is not over:
        return [*base, *over]
    return over


def service(*names: str) -> dict[str, Any]:
    found: dict[str, Any] = read(*names)["services"]["gemmwire"]
    return found


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name, each with the lines of those that it is built on."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.M)[1:]:
        head = re.match(r"FROM (\S+) AS (\S+)\n", part)
        assert head, f"a stage without a name: {part.splitlines()[0]}"
        found[head[2]] = found.get(head[1], "") + part
    return found


def variables(stage: str) -> dict[str, str]:
    """What a stage sets by ENV."""
    lines = stages()[stage].replace("\\\n", " ").splitlines()
    pairs = [
        pair for line in lines if line.startswith("ENV ") for pair in re.findall(r'(\w+)=("[^"]*"|\S+)', line)
    ]
    return {name: value.strip('"') for name, value in pairs}


def test_the_two_compose_files_are_one_valid_service(tmp_path: Path) -> None:
    """Guards: an override that is valid by itself and makes no service together with what it overrides."""
    both = tmp_path / "both.yml"
    YAML().dump(read(*COMPOSE), both)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(both)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gpu_keeps_all_that_protects_the_service() -> None:
    """Guards: an override that loses the read-only file system, or a port that the network sees."""
    cpu, gpu = service(COMPOSE[0]), service(*COMPOSE)
    changed = {"image", "build", "environment", "healthcheck", "deploy"}
    assert {name: value for name, value in gpu.items() if name not in changed} == {
        name: value for name, value in cpu.items() if name not in changed
    }
    assert (gpu["image"], gpu["build"]) == ("gemmwire:gpu", {**cpu["build"], "target": "gpu"})
    assert gpu["environment"].items() >= cpu["environment"].items()
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_service_has_no_rights() -> None:
    cpu = service(COMPOSE[0])
    assert (cpu["read_only"], cpu["cap_drop"]) == (True, ["ALL"])
    assert cpu["security_opt"] == ["no-new-privileges:true"]
    assert [port.split(":")[0] for port in cpu["ports"]] == ["127.0.0.1"]
    assert "USER 10001:10001" in stages()["cpu"]
    assert "USER 10001:10001" in stages()["gpu"]


def test_every_target_is_a_stage() -> None:
    targets = {service(COMPOSE[0])["build"]["target"], service(*COMPOSE)["build"]["target"]}
    assert targets == {"cpu", "gpu"}
    assert targets <= stages().keys()


def test_a_stop_waits_longer_than_the_service_gives_its_requests() -> None:
    """Guards: a service that is killed while it answers."""
    seconds = re.fullmatch(r"(\d+)s", service(COMPOSE[0])["stop_grace_period"])
    assert seconds
    assert int(seconds[1]) > server.GRACE_S


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_every_variable_is_a_setting(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a setting that was renamed, so that no container starts; one that nobody reaches."""
    files = COMPOSE if target == "gpu" else COMPOSE[:1]
    given = {**variables(target), **service(*files)["environment"]}
    ours = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in given.items() if name[:4] == "GEMM"
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    settings = load([], ours)
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert [source.path for source in settings.sources()] == ["glassllm"]
    assert service(*files)["ports"][0].endswith(f":{settings.port}")


def test_an_image_for_a_gpu_is_made_and_run_as_it_is_checked() -> None:
    """Guards: modules for other GPUs than those that are checked, or a server that downloads in a request."""
    assert variables("build-gpu")["FLASHINFER_CUDA_ARCH_LIST"] == bake.ARCHITECTURE_LIST
    made, run = variables("build-gpu"), variables("gpu")
    assert {name for name in bake.OFFLINE if run.get(name)} == set(bake.OFFLINE)
    assert made["FLASHINFER_CUBIN_DIR"] == run["FLASHINFER_CUBIN_DIR"]
    assert {name for name in bake.OFFLINE[:2] if name in made} == set(), "nothing could be baked"
    assert stages()["gpu"].rstrip().endswith("python -m gemmwire_service.bake check")


def test_what_is_copied_is_in_the_context() -> None:
    """Guards: a build that fails in a clone, because .dockerignore leaves out what the Dockerfile takes."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), line
            assert [each for each in kept if fnmatch.fnmatch(each, name) or each.startswith(f"{name}/")], line


def test_the_health_check_is_the_services_own() -> None:
    command = re.search(r'^HEALTHCHECK .*\\\n +CMD \["python", "-m", "(.*)"\]$', DOCKERFILE, re.M)
    assert command
    assert (ROOT / "service" / Path(*command[1].split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ({"a": [1]}, {"a": [2]}, {"a": [1, 2]}),
        ({"a": "x"}, {"a": "y"}, {"a": "y"}),
        ({"a": [1]}, {}, {"a": [1]}),
    ],
)
def test_files_are_merged_as_compose_merges_them(base: Any, over: Any, merged: Any) -> None:
    assert merge(base, over) == merged
