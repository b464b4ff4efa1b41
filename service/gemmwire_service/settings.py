"""The service's settings: one frozen model. A flag wins over its GEMMWIRE_* variable, that over the default.

`parser()` makes the flags from the fields, so that a setting is written down once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .errors import SettingsError
from .fusing import Rule, read_rules

PREFIX = "GEMMWIRE_"
DEMO = "demo=glassllm"
# The server's process makes such objects, or may: no client must get at them.
_OF_LIBRARIES = ("torch_", "nccl-", "cuda.shm", "psm_", "sem.", "nvshmem", "jemalloc")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})")
_LARGEST_RANDOM = 1 << 31
_RANDOM = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["text", "json"]
Texts = Annotated[tuple[str, ...], NoDecode]


@dataclass(frozen=True)
class ModelSource:
    """`--model NAME=PATH`: the layers of the checkpoint at `path` are served as `name.<module path>`."""

    name: str
    path: str


@dataclass(frozen=True)
class RandomLayer:
    """`--random-layer NAME=NxK`: a layer of Gaussian weights, for a first try or a benchmark."""

    name: str
    n: int
    k: int


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    model: Texts = Field((), description="checkpoint to serve: [NAME=]DIR_OR_FILE; may be repeated")
    allow_unquantized: bool = Field(
        False,
        description="serve the layers too that an MXFP8 checkpoint keeps unquantized, quantized at load",
    )
    reference: Texts = Field(
        (),
        description="unquantized model to hold an MXFP8 checkpoint against: [NAME=]DIR_OR_FILE, NAME as in "
        "--model; may be repeated",
    )
    fuse: Texts = Field(
        (),
        description="layers to fuse into one along N, each an output of its own: qkv, gate_up or "
        "NAME=PART+PART; may be repeated",
    )
    model_root: str = Field(
        "", description="folder whose checkpoints can be loaded and unloaded while the server runs"
    )
    refit_dir: str = Field(
        "",
        description="folder that servers of one checkpoint share: a weight that one of them is given (refit) "
        "is taken by all, and by those that start later",
    )
    part: str = Field(
        "",
        description="serve a part of the layers, INDEX/COUNT, as 1/2 and 2/2: split by bytes, and equally by "
        "every server of the same checkpoint",
    )
    random_layer: Texts = Field((), description="random layer to serve: NAME=NxK; may be repeated")
    backend: str = Field(
        "auto", description="auto, one backend's name (binding), or a comma list (preference)"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:INDEX")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    uds: str = Field("", description="path of a Unix socket to listen on, beside the port")
    key_file: str = Field(
        "",
        description="file of hashed API keys, as gemmwire-serve key writes it; every request needs one then; "
        "read again at SIGHUP",
    )
    insecure: bool = Field(
        False, description="listen on an address that others can reach without keys of its own"
    )
    tls_cert: str = Field(
        "", description="certificate and chain in PEM: the port speaks https; read again at SIGHUP"
    )
    tls_key: str = Field("", description="private key of the certificate, where that is a file of its own")
    shm_prefix: str = Field(
        "",
        description="take tensors in shared memory, in objects whose names begin so and that clients running "
        "as the same user have made; empty: off",
    )
    cuda_shm: bool = Field(
        False, description="take tensors in memory of the GPU that other processes have allocated"
    )
    max_bucket: int = Field(
        4096, ge=1, le=65536, description="largest M of one forward; more rows are chunked"
    )
    max_body_bytes: int = Field(256 << 20, ge=1024, description="largest request body, and largest answer")
    max_weights_bytes: int = Field(
        4 << 30, ge=1024, description="bytes of new weights (refit) that are taken at one time, all together"
    )
    max_json_bytes: int = Field(2 << 20, ge=1024, description="largest JSON part of a request or an answer")
    max_queue: int = Field(1024, ge=1, description="requests that may wait; one more is answered 503")
    max_queue_rows: int = Field(1 << 20, ge=1, description="rows that may wait; beyond them 503")
    max_queue_bytes: int = Field(
        2 << 30,
        ge=1024,
        description="bytes of requests that come or wait and of their answers, until they are read",
    )
    max_rows: int = Field(65536, ge=1, description="rows of one request")
    max_connections: int = Field(1024, ge=1, description="clients at one time; one more is answered 503")
    keep_alive_s: int = Field(75, ge=1, description="seconds that a connection may rest between two requests")
    stall_s: float = Field(
        30, gt=0, description="seconds that a client may let a request, or the reading of an answer, rest"
    )
    min_bytes_per_s: int = Field(
        128 << 10,
        ge=1,
        description="a client that sends or reads slower on the whole is cut off; it has --stall-s more",
    )
    fast_path: bool = Field(
        True, description="take infer requests from the socket, past ASGI; the answers are the same"
    )
    cpu_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="threads of one CPU matmul; 0 is one less than the cores, and all for a long one",
    )
    graph_budget_bytes: int = Field(
        4 << 30,
        ge=0,
        description="device memory for CUDA graphs; buckets beyond it run without, as all do at 0",
    )
    batch_invariant: bool = Field(
        False, description="a row has the same bits at any M: by a kernel that promises it, or one fixed M"
    )
    cache_dir: str = Field(
        "auto",
        description="folder for measured plans and compiled functions; auto is $XDG_CACHE_HOME/gemmwire, "
        "else ~/.cache/gemmwire",
    )
    weight_cache: str = Field(
        "",
        description="folder to keep quantized weights in for the next start, half the size of a BF16 model",
    )
    log_level: LogLevel = Field("info", description="critical, error, warning, info or debug")
    log_format: LogFormat = Field("text", description="text, or json: one object a line")
    access_log: bool = Field(False, description="a line for every request")
    slow_request_ms: int = Field(
        1000, ge=0, description="an infer request that takes so long is logged, as all that fail are; 0: none"
    )
    otlp_endpoint: str = Field(
        "", description="URL of an OpenTelemetry collector (OTLP over HTTP) to send spans to; empty: off"
    )

    @field_validator("model", "reference", "fuse", "random_layer", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
            raise ValueError("it must be a URL, as http://127.0.0.1:4318")
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", value):
            raise ValueError("it must be auto, cpu, cuda or cuda:INDEX")
        return value

    @field_validator("part")
    @classmethod
    def _part(cls, value: str) -> str:
        match = _PART.fullmatch(value)
        if value and (match is None or int(match[1]) > int(match[2])):
            raise ValueError("it must be INDEX/COUNT, as 1/2 and 2/2 for the halves")
        return value

    @field_validator("shm_prefix")
    @classmethod
    def _shm_prefix(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{2,63}", value):
            raise ValueError("it must be 3 to 64 letters, digits and '._-', as gemmwire")
        if any(name.startswith(value) or value.startswith(name) for name in _OF_LIBRARIES if value):
            raise ValueError("libraries name their own shared memory so; take another, as gemmwire")
        return value

    @model_validator(mode="after")
    def _same_on_all_servers(self) -> Settings:
        if self.part and self.model_root:
            raise ValueError(
                "--part is of layers that are there from the start, and a model of --model-root comes as a "
                "whole; leave one of the two out"
            )
        if self.refit_dir and self.model_root:
            raise ValueError(
                "--refit-dir is for layers that all servers have; a model of --model-root is loaded by one "
                "of them; leave one of the two out"
            )
        return self

    def sources(self) -> tuple[ModelSource, ...]:
        """The checkpoints to serve; the embedded demo where nothing is named. Errors: SettingsError."""
        texts = self.model or (() if self.random_layer or self.model_root else (DEMO,))
        return tuple(_source(text) for text in texts)

    def references(self) -> dict[str, str]:
        """Paths of unquantized models by the name of their source. Errors: SettingsError."""
        found: dict[str, str] = {}
        names = {source.name for source in self.sources()}
        for source in (_source(text, "--reference") for text in self.reference):
            if source.name not in names or source.name in found:
                what = "named twice" if source.name in found else "no --model of that name"
                raise SettingsError(
                    f"--reference names {source.name!r}: {what}; one for each of {sorted(names)} at most",
                    expected=sorted(names),
                    got=source.name,
                )
            found[source.name] = source.path
        return found

    def fuse_rules(self) -> tuple[Rule, ...]:
        """Errors: SettingsError."""
        return read_rules(self.fuse)

    def random_layers(self) -> tuple[RandomLayer, ...]:
        return tuple(_random(text) for text in self.random_layer)


def _source(text: str, flag: str = "--model") -> ModelSource:
    name, equals, path = text.partition("=")
    if not equals and text:
        return ModelSource("", text)
    if not _NAME.fullmatch(name) or not path:
        raise SettingsError(
            f"{flag} is {text!r}; it must be NAME=PATH or PATH; NAME has letters, digits and '._-'",
            expected="[NAME=]PATH",
            got=text,
        )
    return ModelSource(name, path)


def _random(text: str) -> RandomLayer:
    name, _, shape = text.partition("=")
    size = _RANDOM.fullmatch(shape)
    if not _NAME.fullmatch(name) or size is None:
        raise SettingsError(
            f"--random-layer is {text!r}; it must be NAME=NxK, such as try=1024x4096; "
            "NAME has letters, digits and '._-'",
            expected="NAME=NxK",
            got=text,
        )
    n, k = int(size[1]), int(size[2])
    if n * k > _LARGEST_RANDOM:
        raise SettingsError(
            f"--random-layer is {text!r}, {n * k} weights; at most {_LARGEST_RANDOM} are made", got=text
        )
    return RandomLayer(name, n, k)


def load(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Flags over variables over defaults. Errors: SettingsError; argparse exits 2 on an unknown flag."""
    refuse_unknown_variables(os.environ if environ is None else environ)
    given = vars(_parse(arguments))
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(detail) for detail in error.errors())) from None


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    flags = parser()
    given, unknown = flags.parse_known_args(list(arguments))
    if unknown:
        flags.error(_unknown(unknown[0]))
    return given


def _unknown(word: str) -> str:
    """What to say of a word that is no flag: what may have been meant."""
    if not word.startswith("-"):
        return f"{word!r} belongs to no option; a checkpoint is --model {word}"
    known = [_flag(name) for name in Settings.model_fields]
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f"there is no option {word}; {f'did you mean {near[0]}?' if near else '--help lists them'}"


def parser() -> argparse.ArgumentParser:
    """One flag a field: `max_body_bytes` is --max-body-bytes and GEMMWIRE_MAX_BODY_BYTES."""
    result = argparse.ArgumentParser(
        prog="gemmwire-serve",
        usage="gemmwire-serve [COMMAND] [--OPTION VALUE ...]    (--help lists the options)",
        description="Serve MXFP8 linear layers over the Open Inference Protocol. Every option is also a "
        "variable: --max-queue is GEMMWIRE_MAX_QUEUE. With no option it serves a small real model.",
        epilog="gemmwire-serve check says what this host has and lacks, and tries each backend on it; "
        "gemmwire-serve quantize SRC DST writes a model in MXFP8, and gemmwire-serve accuracy CHECKPOINT "
        "measures what that costs.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            result.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=field.description)
            continue
        repeated = get_args(field.annotation)[:1] == (str,)
        default = "" if repeated else f" (default {field.default})"
        result.add_argument(
            _flag(name),
            action="append" if repeated else "store",
            metavar="VALUE",
            help=f"{field.description}{default}".replace("%", "%%"),
        )
    return result


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A GEMMWIRE_* variable that is no setting is a typing error, not a comment."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in environ:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the variables are {', '.join(sorted(known))}"
            raise SettingsError(f"The variable {name} is no setting of gemmwire-serve; {hint}", got=name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _explain(detail: Mapping[str, Any]) -> str:
    if not detail["loc"]:
        return f"The settings do not fit: {_said(detail)}"
    name = str(detail["loc"][0])
    return f"{_flag(name)} (or {PREFIX}{name.upper()}) is {detail['input']!r}: {_said(detail)}"


def _said(detail: Mapping[str, Any]) -> str:
    return str(detail["msg"]).removeprefix("Value error, ")
