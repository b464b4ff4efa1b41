"""Errors of the service that are not of the wire.

    ServiceError
    ├── SettingsError      a flag, a GEMMWIRE_* variable or their combination is wrong
    ├── CheckpointError    a file or tensor of a checkpoint cannot be served
    ├── OutputError        a file or folder cannot be written, or must not be replaced
    ├── BackendError       no backend, or not the named one, can run a layer here
    └── EngineError        see engine errors: each has its HTTP status
        ├── NotReady       503  the layers are still being loaded
        ├── QueueFull      503  the waiting line is at its bound
        ├── ConnectionsFull 503 as many clients are connected as may be
        ├── Draining       503  the server is shutting down
        ├── DeadlineExceeded 504  the caller's deadline passed before an answer
        ├── DeviceFailed   500  the device raised while it computed this request
        ├── WeightsRefused 400  a new weight that the layer cannot take
        ├── ModelRefused   400  a model that cannot be loaded; what was there is served as before
        ├── ModelUnknown   404  no such model in the model root, or none that is served
        ├── VersionConflict 409 the layer is not in the version that the caller takes it to be
        ├── VersionBehind  503  the layer is in an older version than the request asks for at least
        ├── DeviceLost     503  the device can compute nothing more, and the server ends
        └── AccessRefused  see access: from the head alone
            ├── KeyRefused   401  KeyMissing, KeyMalformed or KeyUnknown
            ├── ScopeMissing 403  the key is for other routes
            └── CrossSite    403  a web page of another site asks, and there are no keys

Every message says what was given, what is needed and the way out.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """Base of the tree. `expected` and `got` repeat the two sides of the message for machines."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, expected: object = None, got: object = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class SettingsError(ServiceError):
    code = "settings_invalid"


class CheckpointError(ServiceError):
    code = "checkpoint_invalid"


class OutputError(ServiceError):
    code = "output_failed"


class BackendError(ServiceError):
    code = "backend_unavailable"


class EngineError(ServiceError):
    """An answer that the engine could not give; `status` is the HTTP status it becomes."""

    status: ClassVar[int] = 500


class NotReady(EngineError):
    code = "not_ready"
    status = 503


class QueueFull(EngineError):
    code = "queue_full"
    status = 503


class ConnectionsFull(EngineError):
    code = "connections_full"
    status = 503


class Draining(EngineError):
    code = "draining"
    status = 503


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"
    status = 504


class DeviceFailed(EngineError):
    code = "device_failed"
    status = 500


class WeightsRefused(EngineError):
    code = "weights_invalid"
    status = 400


class ModelRefused(EngineError):
    code = "model_invalid"
    status = 400


class ModelUnknown(EngineError):
    code = "model_unknown"
    status = 404


class VersionConflict(EngineError):
    code = "version_conflict"
    status = 409


class VersionBehind(EngineError):
    code = "version_behind"
    status = 503


class DeviceLost(EngineError):
    code = "device_lost"
    status = 503


class AccessRefused(EngineError):
    code = "forbidden"
    status = 403


class KeyRefused(AccessRefused):
    """`challenge` says how a key is shown; with `browsable`, in a way that browsers know too."""

    status = 401

    def __init__(self, message: str, browsable: bool) -> None:
        super().__init__(message)
        # Basic first: Chromium looks at no other challenge of a line, and would not ask for the key.
        basic = 'Basic realm="gemmwire", charset="UTF-8", ' if browsable else ""
        self.challenge = f'{basic}Bearer realm="gemmwire"'


class KeyMissing(KeyRefused):
    code = "key_missing"


class KeyMalformed(KeyRefused):
    code = "key_malformed"


class KeyUnknown(KeyRefused):
    code = "key_unknown"


class ScopeMissing(AccessRefused):
    code = "scope_missing"


class CrossSite(AccessRefused):
    code = "cross_site"
