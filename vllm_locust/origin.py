"""Where a server is, and how to speak TLS with it."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from vllm_locust.errors import InputError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is: what `--host` says, without the path."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def netloc(self) -> str:
        """Value of the Host header (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def origin_of(url: str, *, insecure: bool = False, ca_pem: str | None = None) -> tuple[Origin, str]:
    """Split `--host` into the origin and the path before `/v1`; a trailing `/v1` may be given or left out."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host and "@" in parts.netloc:
        raise InputError("--host has a user name or password in it, which is not used; give a key by --api-key")
    if not host or port == 0 or parts.scheme not in ("http", "https"):
        raise InputError(f"--host {url!r} is not the address of a server; write it like http://my-server:8000")
    tls = None
    if parts.scheme == "https":
        tls = tls_context(insecure=insecure, ca_pem=ca_pem)
    path = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
    return Origin(host, port or (443 if tls else 80), tls), path


def read_ca(path: str) -> str:
    """Return the certificates of a PEM file as text, which travels to workers that do not have the file."""
    try:
        pem = Path(path).read_text(encoding="ascii")
        ssl.create_default_context(cadata=pem)
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"--ca-file {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"--ca-file {path}: no certificate in it; expected a PEM file") from None
    return pem


def tls_context(*, insecure: bool, ca_pem: str | None) -> ssl.SSLContext:
    """Return how to speak TLS: with the check of certificates, of the given authorities if any, or without."""
    context = ssl.create_default_context(cadata=ca_pem)
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
