"""The compose files as docker itself reads and merges them."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from docker_host import Docker
from source_tree import ROOT

pytestmark = [pytest.mark.container, pytest.mark.timeout(3600)]

FILES = ("docker-compose.yml", "docker-compose.gpu.yml")


def service(engine: Docker, *files: str) -> dict[str, Any]:
    named = [word for name in files for word in ("--file", str(ROOT / name))]
    # A note about a version that it misses would come before the document.
    said = engine.up(*named, "config")
    document = said[said.index("services:") :] if said.startswith("time=") else said
    found: dict[str, Any] = YAML(typ="safe").load(document)["services"]["gemmwire"]
    return {**found, "volumes": sorted(map(str, found["volumes"]))}  # an old one writes them in any order


def test_docker_merges_the_two_files(engine: Docker) -> None:
    """Guards: an override that a schema allows and docker reads in another way."""
    cpu, gpu = service(engine, FILES[0]), service(engine, *FILES)
    changed = {"image", "build", "environment", "healthcheck", "deploy"}
    assert {name: value for name, value in gpu.items() if name not in changed} == {
        name: value for name, value in cpu.items() if name not in changed
    }
    assert (gpu["image"], gpu["build"]["target"], gpu["build"]["context"]) == (
        "gemmwire:gpu",
        "gpu",
        cpu["build"]["context"],
    )
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
