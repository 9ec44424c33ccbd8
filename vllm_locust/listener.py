"""The port on which Prometheus scrapes."""

import errno
from dataclasses import dataclass

from gevent.pool import Pool
from gevent.pywsgi import WSGIServer
from gevent.socket import AF_INET, AF_INET6, create_server, has_dualstack_ipv6
from prometheus_client import CollectorRegistry

from vllm_locust.errors import InputError
from vllm_locust.exposition import application

_MAX_PORT = 65535
_CLOSE_S = 0.2
"""How long closing waits for a scrape that is under way."""


@dataclass(frozen=True, slots=True)
class Server:
    """A listener that answers scrapes, in the gevent hub of the thread that started it."""

    port: int
    _wsgi: WSGIServer

    def close(self) -> None:
        """Stop listening, and end the connections that scrapers keep open."""
        self._wsgi.stop(timeout=_CLOSE_S)


def serve(registry: CollectorRegistry, port: int, host: str = "") -> Server:
    """Listen on a port (0: any free one) of one address or all; raises `InputError` where that cannot be."""
    advice = "give a free port from 1 to 65535, or 0 to export nothing"
    if not 0 <= port <= _MAX_PORT:
        message = f"--prometheus-port: {port} is no port; {advice}"
        raise InputError(message)
    dual = not host and has_dualstack_ipv6()
    family = AF_INET6 if dual or ":" in host else AF_INET
    try:
        listener = create_server((host, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken, perhaps by another master" if taken else f"cannot be used: {error}"
        message = f"--prometheus-port: port {port} {why}; {advice}"
        raise InputError(message) from error
    listener.settimeout(0)  # gevent accepts until that would block
    wsgi = WSGIServer(
        listener,
        application(registry),
        spawn=Pool(),  # without a pool, `stop` would leave open connections running
        log=None,
        environ={"SERVER_NAME": host or "localhost"},  # spares gevent a reverse DNS query
    )
    wsgi.start()
    return Server(wsgi.server_port, wsgi)


def port_of(value: str | int) -> int:
    """Return the port that an option names; raises `InputError` where it names none."""
    try:
        port = int(value)
    except ValueError:
        port = -1
    if not 0 <= port <= _MAX_PORT:
        raise InputError(f"--prometheus-port is {value!r}, expected 0 to 65535; 0 turns the metrics off")
    return port
