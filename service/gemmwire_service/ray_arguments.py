"""What an application under Ray Serve is given, as `name=value` or in a config file, checked at once.

A name is one of `Scaling`, or one of the service's settings; those of a socket or of one process are refused,
each with the place where Ray has them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import SettingsError
from .settings import Settings

_PROXY = "Ray's proxy has the socket: set it in http_options, or with `serve start`"
_ONE_PROCESS = "it is for the one process on a client's own host, and Ray's proxy may be anywhere"
NOT_OFFERED = {
    "host": _PROXY,
    "port": _PROXY,
    "uds": _PROXY,
    "insecure": _PROXY,
    "tls_cert": _PROXY + "; TLS ends in front of Ray",
    "tls_key": _PROXY + "; TLS ends in front of Ray",
    "max_connections": _PROXY,
    "keep_alive_s": _PROXY,
    "stall_s": _PROXY,
    "min_bytes_per_s": _PROXY,
    "fast_path": _PROXY,
    "shm_prefix": _ONE_PROCESS,
    "cuda_shm": _ONE_PROCESS,
    "part": "placement=partition gives each replica its part",
    "model_root": "a model would be loaded by one replica of many; deploy the application again with "
    "another model, or replace weights through refit_dir",
}


class Scaling(BaseModel):
    """How many replicas there are, and what Ray gives to each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    placement: Literal["replicate", "partition"] = Field(
        "replicate", description="every replica has all layers, or each part has some of them"
    )
    parts: int = Field(0, ge=0, le=1024, description="parts of a partition; each is replicated by itself")
    min_replicas: int = Field(1, ge=1, description="replicas that are always there")
    max_replicas: int = Field(0, ge=0, description="replicas that load may bring; 0 is min_replicas")
    target_ongoing_requests: float = Field(
        8.0, gt=0, description="requests under way a replica beyond which there will be more replicas"
    )
    upscale_delay_s: float = Field(30.0, ge=1, description="seconds of such load before there are more")
    downscale_delay_s: float = Field(600.0, ge=1, description="seconds of less load before there are fewer")
    max_ongoing_requests: int = Field(
        256, ge=1, description="requests under way at one replica; more wait in Ray's proxy"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray sets aside for a replica")
    num_gpus: float | None = Field(
        None, ge=0, description="GPUs of a replica; by default 1, and 0 where the device is the CPU"
    )

    @model_validator(mode="after")
    def _fit(self) -> Scaling:
        if self.max_replicas and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}"
            )
        if (self.placement == "partition") != (self.parts > 1):
            raise ValueError(
                f"placement is {self.placement} with parts={self.parts}; a partition has parts=2 or more, "
                "and replicas have none"
            )
        return self

    @property
    def most(self) -> int:
        return self.max_replicas or self.min_replicas


@dataclass(frozen=True)
class Arguments:
    settings: Settings
    scaling: Scaling


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Errors: SettingsError, one sentence for each argument that is unknown, ill-typed or not offered."""
    scaling = {name: value for name, value in given.items() if name in Scaling.model_fields}
    rest = {name: value for name, value in given.items() if name not in scaling}
    refused = [_refusal(name, rest[name]) for name in rest if name not in _offered()]
    if refused:
        raise SettingsError("\n".join(refused), got=sorted(rest))
    try:
        return Arguments(Settings(**rest), Scaling(**scaling))
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(detail) for detail in error.errors())) from None


def _offered() -> list[str]:
    return [name for name in Settings.model_fields if name not in NOT_OFFERED]


def _refusal(name: str, value: object) -> str:
    if name in NOT_OFFERED:
        return f"Argument {name}={value!r} is not for an application under Ray: {NOT_OFFERED[name]}"
    known = [*Scaling.model_fields, *_offered()]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the arguments are {', '.join(known)}"
    return f"There is no argument {name[:80]!r}; {hint}"


def _explain(detail: Mapping[str, Any]) -> str:
    name = ".".join(map(str, detail["loc"]))
    what = str(detail["msg"]).removeprefix("Value error, ")
    return f"Argument {name} is {detail['input']!r}: {what}" if name else f"The arguments do not fit: {what}"
