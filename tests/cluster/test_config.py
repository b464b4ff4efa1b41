"""The config files of deploy/ray, and what `serve run` makes of arguments that are wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmwire import Client
from gemmwire_service.ray_arguments import read_arguments
from ray_cluster import deployed
from source_tree import ROOT

pytestmark = pytest.mark.ray

FOLDER = ROOT / "deploy" / "ray"
# Of ray-operator/apis/ray/v1, as far as the manifest goes; Kubernetes' own schema holds a pod's template.
KNOWN = {
    "spec": {"serveConfigV2", "rayClusterConfig"},
    "rayClusterConfig": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def read(name: str) -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Of the one application of a config that Ray takes."""
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "gemmwire_service.ray:app"
    names = {deployment.name for deployment in application.deployments}
    assert names <= {"gemmwire"}, "Ray refuses an override of a deployment that is not there"
    args: dict[str, Any] = application.args
    return args


def test_the_config_is_one_that_ray_and_the_application_take(proxy: str) -> None:
    """Guards: an example that does not start."""
    with (
        deployed(proxy, "example", **arguments(read("serve.yaml"))) as running,
        Client(running.url) as client,
    ):
        layer = client.layers()[0]
        assert client.infer(layer.name, np.ones((2, layer.k), np.float32)).shape == (2, layer.n)
        assert running.running() == 2


def test_the_manifest_s_config_is_one_too() -> None:
    import yaml

    given = arguments(yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"]))
    assert read_arguments(given).settings.device == "cuda"


def test_the_manifest_is_a_rayservice() -> None:
    """Guards: a field that no KubeRay knows, and a Ray that differs from the image's."""
    manifest = read("rayservice.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    cluster = manifest["spec"]["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    for name, fields in (
        ("spec", manifest["spec"]),
        ("rayClusterConfig", cluster),
        ("headGroupSpec", cluster["headGroupSpec"]),
        ("workerGroupSpec", worker),
    ):
        assert fields.keys() == KNOWN[name]
    assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    for group in (cluster["headGroupSpec"], worker):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(":" + cluster["rayVersion"])


@pytest.mark.parametrize("group", ["head", "worker"])
def test_its_pods_are_what_kubernetes_takes(group: str) -> None:
    import kubernetes_validate

    cluster = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    spec = cluster["headGroupSpec"] if group == "head" else cluster["workerGroupSpecs"][0]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, "spec": spec["template"]["spec"]}
    kubernetes_validate.validate(pod, "1.34", strict=True)


def test_a_wrong_argument_ends_serve_run_with_a_sentence() -> None:
    """Guards: a typing error that starts a cluster of defaults."""
    command = [str(Path(sys.executable).with_name("serve")), "run", "gemmwire_service.ray:app"]
    done = subprocess.run([*command, "modle=x", "port=1"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "There is no argument 'modle'; did you mean model?" in done.stderr
    assert "Ray's proxy has the socket" in done.stderr
