"""Sockets of our own: they reach whoever accepts, fail as sockets do, and write all of what they are given."""

import errno
import hashlib
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import gevent
import pytest
from gevent.threadpool import ThreadPool

from vllm_locust import tcp
from vllm_locust.tcp import connect, send_all

REFUSED = 1
"""A port that nobody listens on, and no unprivileged process could."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def address(host: str, port: int) -> tuple[Any, ...]:
    """Return an address as getaddrinfo(3) would."""
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[Any, ...]) -> None:
    """Have every name stand for these addresses: a machine of the test has no such names."""
    monkeypatch.setattr(tcp, "_addresses", lambda host, port: addresses)  # noqa: ARG005


def sockets_open() -> int:
    """Return the number of descriptors that are open."""
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    return len(list(Path(folder).iterdir()))


# Opening one


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "localhost"])
def test_a_host_is_reached_by_number_and_by_name(host: str, listener: socket.socket) -> None:
    with closing(connect(host, port_of(listener), 5.0)) as sock:
        peer, _ = listener.accept()
        with peer:
            assert peer.getpeername() == sock.getsockname()
            assert sock.getblocking() is False


def test_a_host_is_reached_by_ipv6() -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listening, closing(connect("::1", port_of(listening), 5.0)) as sock:
        assert sock.getpeername()[:2] == ("::1", port_of(listening))


def test_a_host_is_reached_by_the_first_of_its_addresses_that_accepts(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_family = (253, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", REFUSED))
    number = port_of(listener)
    resolving_to(monkeypatch, no_family, address("127.0.0.1", REFUSED), address("127.0.0.1", number))
    with closing(connect("some-name", number, 5.0)) as sock:
        assert sock.getpeername() == ("127.0.0.1", number)


def test_a_host_of_which_no_address_accepts_fails_as_its_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, address("127.0.0.1", REFUSED), address("127.0.0.2", REFUSED))
    with pytest.raises(ConnectionRefusedError):
        connect("some-name", REFUSED, 5.0)


def test_a_resolver_that_does_not_answer_is_waited_for_no_longer_than_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gevent.socket.getaddrinfo", lambda *_, **__: gevent.sleep(30))
    with pytest.raises(TimeoutError, match=r"^no address of far.example within 0.2 s$"):
        connect("far.example", 80, 0.2)


def test_a_host_without_an_address_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch)
    with pytest.raises(OSError, match="some-name has no address"):
        connect("some-name", 80, 5.0)


def test_a_port_that_nobody_listens_on_refuses_and_no_socket_is_left() -> None:
    connect_refused()
    before = sockets_open()
    for _ in range(20):
        connect_refused()
    assert sockets_open() == before


def connect_refused() -> None:
    with pytest.raises(ConnectionRefusedError) as refused:
        connect("127.0.0.1", REFUSED, 5.0)
    assert refused.value.errno == errno.ECONNREFUSED
    assert "refused" in str(refused.value)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a" * 64 + ".example", "\udc80"])
def test_a_name_that_stands_for_nothing_is_an_error_of_the_system(host: str) -> None:
    with pytest.raises(OSError, match=r"name|host|Name"):
        connect(host, 80, 5.0)


@pytest.fixture
def full() -> Iterator[int]:
    """Return a port whose listener accepts nobody, and whose queue is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(64):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(0.5)
            try:
                sock.connect(listening.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("no queue of a listener is ever full here")
        yield port_of(listening)


def test_a_host_that_does_not_answer_is_a_time_out_and_no_socket_is_left(full: int) -> None:
    before, began_s = sockets_open(), time.monotonic()
    with pytest.raises(TimeoutError, match="timed out"):
        connect("127.0.0.1", full, 0.2)
    assert time.monotonic() - began_s >= 0.2
    assert sockets_open() == before


def test_the_time_is_that_of_all_addresses_together(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving_to(monkeypatch, *[address("127.0.0.1", full)] * 100)
    # 100 times as long would be more than any stall.
    with gevent.Timeout(20), pytest.raises(TimeoutError):
        connect("some-name", full, 0.3)


def test_a_greenlet_that_is_killed_while_it_connects_leaves_no_socket(full: int) -> None:
    before = sockets_open()
    connecting = gevent.spawn(connect, "127.0.0.1", full, 60.0)
    gevent.sleep(0.02)
    assert sockets_open() == before + 1
    connecting.kill()
    assert isinstance(connecting.value, gevent.GreenletExit)
    assert sockets_open() == before


# Writing to it


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(
    full: int, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = port_of(listener)
    resolving_to(monkeypatch, address("127.0.0.1", full), address("127.0.0.1", number))
    with closing(connect("some-name", number, 2.0)) as sock:
        assert sock.getpeername() == ("127.0.0.1", number)


def test_a_peer_that_does_not_read_is_a_time_out(listener: socket.socket) -> None:
    with closing(connect("127.0.0.1", port_of(listener), 5.0)) as sock, pytest.raises(TimeoutError):
        send_all(sock, bytes(24_000_000), time.monotonic_ns() + 200_000_000)


def test_more_than_any_buffer_holds_is_written_to_a_slow_reader_while_others_run(listener: socket.socket) -> None:
    data = Random(0).randbytes(24_000_000)
    with closing(connect("127.0.0.1", port_of(listener), 5.0)) as sock:
        peer, _ = listener.accept()

        def read_slowly() -> str:
            read = hashlib.sha256()
            while piece := peer.recv(1_000_000):
                read.update(piece)
                time.sleep(0.001)
            return read.hexdigest()

        writing = gevent.spawn(send_all, sock, data, None)
        gevent.sleep(0.02)
        assert not writing.dead, "it was written though nobody read: the test shows nothing"
        pool = ThreadPool(1)
        reading = pool.spawn(read_slowly)
        turns = 0
        while not writing.dead:
            gevent.sleep(0)
            turns += 1
        assert turns > 1
        assert writing.successful()
        sock.shutdown(socket.SHUT_WR)
        assert reading.get() == hashlib.sha256(data).hexdigest()
        peer.close()
        pool.kill()


def test_nothing_is_written_where_there_is_nothing(listener: socket.socket) -> None:
    with closing(connect("127.0.0.1", port_of(listener), 5.0)) as sock:
        send_all(sock, b"", None)
        sock.shutdown(socket.SHUT_WR)
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(1) == b""


def test_a_greenlet_that_is_killed_while_it_writes_can_close_its_socket(listener: socket.socket) -> None:
    sock = connect("127.0.0.1", port_of(listener), 5.0)
    peer, _ = listener.accept()

    def write() -> None:
        with closing(sock):
            send_all(sock, bytes(24_000_000), None)

    writing = gevent.spawn(write)
    gevent.sleep(0.02)
    assert not writing.dead
    writing.kill()
    assert sock.fileno() == -1
    with peer:
        received = 0
        while piece := peer.recv(1_000_000):
            received += len(piece)
    assert 0 < received < 24_000_000


def test_a_peer_that_leaves_is_an_error_of_the_system(listener: socket.socket) -> None:
    with closing(connect("127.0.0.1", port_of(listener), 5.0)) as sock:
        peer, _ = listener.accept()
        writing = gevent.spawn(send_all, sock, bytes(24_000_000), None)
        gevent.sleep(0.02)
        peer.close()  # with bytes unread, which resets the connection
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            writing.get(timeout=10)
