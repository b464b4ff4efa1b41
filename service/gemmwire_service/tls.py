"""The server's certificate: checked before anything is loaded, and read again while it serves."""

from __future__ import annotations

import logging
import ssl

from .errors import SettingsError

log = logging.getLogger("gemmwire.access")


class Certificate:
    """A chain in PEM and its key, which may lie in the same file. Errors: SettingsError if they fail."""

    def __init__(self, chain: str, key: str) -> None:
        self.chain = chain
        self.key = key
        if not chain:
            raise SettingsError(f"--tls-key is {key!r}, and there is no --tls-cert that it belongs to")
        self._check()

    def reload(self, context: ssl.SSLContext) -> None:
        """Connections from now on are shown what the files hold. Files that cannot be used change nothing."""
        try:
            self._check()
        except SettingsError as error:
            log.error("the certificate of before stays in force: %s", error)
            return
        context.load_cert_chain(self.chain, self.key or None, _no_password)
        log.info("the certificate of %s is in force", self.chain)

    def _check(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.chain, self.key or None, _no_password
            )
        except (OSError, ValueError) as error:  # ssl's own is an OSError
            raise SettingsError(
                f"--tls-cert {self.chain!r} with --tls-key {self.key!r} cannot be used ({error}); they must "
                "be readable files in PEM, a certificate with its chain and its key without a password",
                got=self.chain,
            ) from None


def certificate_of(chain: str, key: str) -> Certificate | None:
    return Certificate(chain, key) if chain or key else None


def _no_password() -> str:
    """Asked by OpenSSL, which would ask the terminal otherwise."""
    raise ValueError("the private key has a password")
