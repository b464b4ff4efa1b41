"""The dashboard, the alerts and the compose file that shows them: held to what the service says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from http_calls import infer, message
from scraped import Scrape
from serving import serving, settings
from source_tree import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "gemmwire.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
COMPOSE = ROOT / "docker-compose.yml"

_METRIC = re.compile(r"\b(?:gemmwire|process|python)_\w+")
_LABELS = re.compile(r"(?:by|on|without) \(([\w, ]*)\)|\{\{(\w+)\}\}|(\w+)(?:=|!=|=~|!~)\"")
_PROMETHEUS_OWN = {"instance", "job", "le", ""}


def yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and alert, a panel's with its legend."""
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], f"{target['expr']} {target['legendFormat']}"
    for group in yaml(PROMETHEUS / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    """Of a server that has answered, and refused."""
    with serving(settings(random_layer=("try=8x32",))) as served:
        body, length = message(torch.ones(1, 32, dtype=torch.bfloat16))
        assert infer(served, "try", body, length).status == 200
        assert infer(served, "none", body, length).status == 404
        return Scrape(served)


def test_every_metric_that_is_shown_is_there(scrape: Scrape) -> None:
    """Guards: a panel that stays empty since a metric was renamed."""
    shown = {(where, name) for where, text in expressions() for name in _METRIC.findall(text)}
    assert len(shown) > 30
    assert {each for each in shown if each[1] not in scrape.names()} == set()


def test_every_label_that_is_shown_is_there(scrape: Scrape) -> None:
    known = {name for _, labels in scrape.samples for name, _ in labels} | _PROMETHEUS_OWN
    for where, text in expressions():
        found = {
            name.strip() for match in _LABELS.findall(text) for part in match for name in part.split(",")
        }
        assert found <= known, where


def test_every_metric_of_ours_is_shown(scrape: Scrape) -> None:
    """Guards: numbers that are made and never looked at."""
    text = " ".join(text for _, text in expressions())
    ours = {name for name in scrape.names() if name.startswith("gemmwire_")}
    assert {name for name in ours if name not in text} == set()


def test_the_panels_lie_side_by_side() -> None:
    places: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_prometheus_takes_its_files() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool; on Debian: apt-get install prometheus")
    for what, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        done = subprocess.run(
            ["promtool", "check", what, str(PROMETHEUS / name)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def shown_by_compose() -> dict[str, Any]:
    """The services of the profile metrics."""
    services = yaml(COMPOSE)["services"]
    return {name: facts for name, facts in services.items() if facts.get("profiles") == ["metrics"]}


def test_the_profile_is_all_but_the_service_and_opens_nothing() -> None:
    """Guards: a plain `up` that fetches Prometheus, or a port that the network sees."""
    assert (
        set(shown_by_compose()) == {"prometheus", "grafana"} == set(yaml(COMPOSE)["services"]) - {"gemmwire"}
    )
    for service in shown_by_compose().values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert [port.split(":")[0] for port in service["ports"]] == ["127.0.0.1"]
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


def test_what_the_compose_file_mounts_is_there() -> None:
    volumes = yaml(COMPOSE)["volumes"]
    for service in shown_by_compose().values():
        for source, *_ in (volume.split(":") for volume in service["volumes"]):
            assert source in volumes or (source.startswith("./") and (ROOT / source).is_dir()), source
    [job] = yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gemmwire:8000"]}]
    [source] = yaml(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_operator_is_told_what_to_do_for_each_alarm() -> None:
    """Guards: an alarm at night that no page knows; a page of an alarm that is gone."""
    alarms = [rule["alert"] for group in yaml(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]]
    page = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| `(Gemmwire\w+)`", page, re.M) == alarms


def test_the_page_lists_every_metric(scrape: Scrape) -> None:
    """Guards: a page that is behind the service."""
    table = (ROOT / "docs" / "monitoring.md").read_text()
    listed = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in _METRIC.findall(line.split("|")[1])
    }
    histogram = {f"gemmwire_stage_seconds_{part}" for part in ("bucket", "count", "sum")}
    ours = {name for name in scrape.names() if name.startswith("gemmwire_")} - histogram
    assert listed == ours | {"gemmwire_stage_seconds"}
