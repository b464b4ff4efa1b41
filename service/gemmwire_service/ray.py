"""gemmwire under Ray Serve: `serve run gemmwire_service.ray:app model=PATH`, or the same in a config file.

With placement=replicate every replica has all layers, and Ray's proxy chooses one for each request. With
placement=partition each of `parts` deployments has some of them, and an ingress in front goes by the layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import cluster_resources, is_initialized, serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from torch import cuda

from .access import Access
from .errors import NotReady, SettingsError
from .ray_arguments import Scaling, read_arguments
from .ray_ingress import Bounds, Distributor
from .ray_replica import Asked, PartReplica, Replica, Told
from .settings import Settings

log = logging.getLogger("gemmwire.ray")

INGRESS_CPUS = 0.5
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
GRACE_S = 20.0  # for the requests under way at a replica that is told to stop
ATTEMPTS = 3  # to load the layers: what a file lacks it lacks again


@dataclass(frozen=True)
class RemotePart:
    """Errors: NotReady, while Ray has no replica of it or has lost the one that was asked."""

    handle: DeploymentHandle

    async def layers(self) -> list[str]:
        names: list[str] = await self.handle.layers.remote()
        return names

    async def ask(self, asked: Asked) -> Told:
        try:
            told: Told = await self.handle.ask.remote(asked)
        except (RayError, RayServeException) as error:
            log.warning("a part did not answer %s %s: %s", asked.method, asked.path, error)
            raise NotReady(
                f"The part that serves this is gone or not there yet ({type(error).__name__}); Ray starts it "
                "again: try later"
            ) from error
        return told


class Ingress:
    """The ingress of a partition, as a deployment."""

    def __init__(self, handles: Sequence[DeploymentHandle], settings: dict[str, Any]) -> None:
        read = Settings(**settings)
        bounds = Bounds(read.max_body_bytes, read.max_weights_bytes, read.max_queue_bytes)
        parts = [RemotePart(handle) for handle in handles]
        self._app = Distributor(parts, Access(read.key_file), bounds)

    def __serve_build_asgi_app__(self) -> Distributor:
        return self._app

    async def check_health(self) -> None:
        """The first time, returns once every part has loaded its layers."""
        await self._app.find_out()


def app(arguments: Mapping[str, Any]) -> Application:
    """The application. Errors: SettingsError, before anything is started."""
    read = read_arguments(arguments)
    settings, scaling = read.settings, read.scaling
    if scaling.placement == "replicate":
        deployment = serve.deployment(**_replicas("gemmwire", settings, scaling))(serve.ingress()(Replica))
        return deployment.bind(_of_a_replica(settings, scaling), scaling.most > 1)
    return _partition(settings, scaling)


def _partition(settings: Settings, scaling: Scaling) -> Application:
    parts = []
    for index in range(1, scaling.parts + 1):
        part = settings.model_copy(update={"part": f"{index}/{scaling.parts}"})
        deployment = serve.deployment(**_replicas(f"part-{index}", part, scaling))(PartReplica)
        parts.append(deployment.bind(_of_a_replica(part, scaling), scaling.most > 1))
    options: dict[str, Any] = {
        **_common("gemmwire", settings),
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": INGRESS_CPUS},
        "max_ongoing_requests": scaling.max_ongoing_requests * scaling.most * scaling.parts,
    }
    ingress = serve.deployment(**options)(serve.ingress()(Ingress))
    return ingress.bind(parts, settings.model_dump())


def _replicas(name: str, settings: Settings, scaling: Scaling) -> dict[str, Any]:
    options: dict[str, Any] = {
        **_common(name, settings),
        "ray_actor_options": {"num_cpus": scaling.num_cpus, "num_gpus": num_gpus(settings, scaling)},
        "max_ongoing_requests": scaling.max_ongoing_requests,
    }
    if scaling.most == scaling.min_replicas:
        return options | {"num_replicas": scaling.min_replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.most,
            "target_ongoing_requests": scaling.target_ongoing_requests,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
        }
    }


def _common(name: str, settings: Settings) -> dict[str, Any]:
    return {
        "name": name,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": ATTEMPTS,
        "logging_config": {"enable_access_log": settings.access_log},
    }


def num_gpus(settings: Settings, scaling: Scaling) -> float:
    """One for each replica, none where the device is the CPU; `auto` goes by what the cluster has, or, before
    it is reached, this machine. Errors: SettingsError where the cluster is not this machine, nor reached yet.
    """
    if scaling.num_gpus is not None:
        return scaling.num_gpus
    if settings.device != "auto":
        return 0.0 if settings.device == "cpu" else 1.0
    if is_initialized():
        found, where = bool(cluster_resources().get("GPU")), "the cluster"
    elif "RAY_ADDRESS" in os.environ:
        raise SettingsError(
            "Argument device is 'auto', and the cluster at RAY_ADDRESS is not reached yet; say device=cuda "
            "for one GPU a replica, or device=cpu",
            expected=["cuda", "cpu"],
            got="auto",
        )
    else:
        found, where = cuda.is_available(), "this machine"
    log.warning("device=auto: %s has %s GPU, and each replica gets %s", where, *_counted(found))
    return 1.0 if found else 0.0


def _counted(found: bool) -> tuple[str, str]:
    return ("a", "one") if found else ("no", "none; say device=cuda where GPUs come later")


def _of_a_replica(settings: Settings, scaling: Scaling) -> dict[str, Any]:
    """Replicas of one host share its cores: each computes with as many threads as Ray set aside for it."""
    threads = settings.cpu_threads or max(1, int(scaling.num_cpus))
    return settings.model_dump() | {"cpu_threads": threads}
