"""Certificates for https on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def made_for(names: str, folder: Path) -> Path:
    """A certificate that vouches for itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate with")
    key, certificate, both = (folder / name for name in ("key", "crt", "pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both
