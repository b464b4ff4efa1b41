"""Servers with API keys, and requests that show one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemmwire_service.keys import ADMIN, INFER, key_of, make_key


@dataclass(frozen=True)
class Drawn:
    """Three keys, and the file that lets them in."""

    path: Path
    infer: str
    admin: str
    both: str

    @property
    def all(self) -> tuple[str, str, str]:
        return self.infer, self.admin, self.both


def drawn(folder: Path) -> Drawn:
    path = folder / "keys"
    keys = Drawn(path, make_key(), make_key(), make_key())
    scopes = ([INFER], [ADMIN], [INFER, ADMIN])
    lines = [
        key_of(name, scope, key).line()
        for name, scope, key in zip(("i", "a", "b"), scopes, keys.all, strict=True)
    ]
    path.write_text("# of the tests\n\n" + "\n".join(lines) + "\n")
    return keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
