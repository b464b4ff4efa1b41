"""gemmwire under Ray Serve: `serve run gemmwire_service.ray:app model=PATH`, or the same in a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import cluster_resources, is_initialized, serve
from ray.serve import Application

from .ray_arguments import Scaling, read_arguments
from .ray_replica import Replica
from .settings import Settings

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
GRACE_S = 20.0  # for the requests under way at a replica that is told to stop


def app(arguments: Mapping[str, Any]) -> Application:
    """The application. Errors: SettingsError, before anything is started."""
    read = read_arguments(arguments)
    return _replicas("gemmwire", read.settings, read.scaling)


def _replicas(name: str, settings: Settings, scaling: Scaling) -> Application:
    options: dict[str, Any] = {
        "name": name,
        "ray_actor_options": {"num_cpus": scaling.num_cpus, "num_gpus": num_gpus(settings, scaling)},
        "max_ongoing_requests": scaling.max_ongoing_requests,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "logging_config": {"enable_access_log": settings.access_log},
    }
    if scaling.most == scaling.min_replicas:
        options["num_replicas"] = scaling.min_replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.most,
            "target_ongoing_requests": scaling.target_ongoing_requests,
        }
    deployment = serve.deployment(**options)(serve.ingress()(Replica))
    return deployment.bind(_of_a_replica(settings, scaling).model_dump())


def num_gpus(settings: Settings, scaling: Scaling) -> float:
    """One for each replica; none where the device is the CPU, or the cluster has only that."""
    if scaling.num_gpus is not None:
        return scaling.num_gpus
    if settings.device != "auto":
        return 0.0 if settings.device == "cpu" else 1.0
    return 1.0 if is_initialized() and cluster_resources().get("GPU") else 0.0


def _of_a_replica(settings: Settings, scaling: Scaling) -> Settings:
    """Replicas of one host share its cores: each computes with as many threads as Ray set aside for it."""
    return settings.model_copy(update={"cpu_threads": settings.cpu_threads or max(1, int(scaling.num_cpus))})
