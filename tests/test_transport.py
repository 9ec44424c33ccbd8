"""Connections: their times are those of the kernel, their bytes all there, their ends known."""

import fcntl
import hashlib
import os
import random
import socket
import struct
import sys
import termios
import time
from array import array
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import gevent
import gevent.server
import gevent.socket
import pytest
from emitter import CLOSE, FIN, RAW, REF, RST, SILENCE, SO_TIMESTAMPNS, Answer, Emitter, Server, script

from vllm_locust.client import Client
from vllm_locust.errors import InputError
from vllm_locust.hub import hub
from vllm_locust.origin import Origin, origin_of, read_ca
from vllm_locust.stamp import Read, read_of
from vllm_locust.timeline import Outcome, Timeline
from vllm_locust.timeouts import Timeouts
from vllm_locust.transport import Connection, ConnectionLostError, CutError, Pool, SilenceError

ASK = b"GET / HTTP/1.1\r\n\r\n"
MS = 1_000_000
PIECE = 8
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux stamps what a TCP socket receives")


def numbered(count: int, every_ms: float, **fields: object) -> Answer:
    """Return an answer of numbered pieces that have all the same length."""
    pieces = [(every_ms * i, b"%07d\n" % i) for i in range(1, count + 1)]
    return Answer(pieces, framing=RAW, **{"ending": CLOSE, **fields})  # type: ignore[arg-type]


def connect(server: Server) -> Connection:
    return Connection(Origin(server.host, server.port), 5.0)


def read_all(connection: Connection, reads: list[Read] | None = None) -> list[Read]:
    """Read to the end; into a list that is given, so that it holds what came before an error."""
    reads = [] if reads is None else reads
    while (read := connection.read()) is not None:
        reads.append(read)
    return reads


def stream(client: Client) -> Timeline:
    timeline = Timeline("id", "short", "chat", time.monotonic_ns())
    client.stream(timeline, b"{}")
    return timeline


def wait_for(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    with gevent.Timeout(timeout_s):
        while not condition():
            gevent.sleep(0.002)


def last_pieces(reads: list[Read]) -> list[int]:
    """Return the index of the piece that each read ends with."""
    ends, total = [], 0
    for read in reads:
        total += len(read.data)
        ends.append((total - 1) // PIECE)
    return ends


# Times


@LINUX
def test_the_kernel_stamps_the_reads_and_its_times_are_those_of_the_sending(emitter: Emitter) -> None:
    server = emitter.serve(numbered(200, 3))
    with closing(connect(server)) as connection:
        connection.send(ASK)
        reads = read_all(connection)
    sent = server.replies()[0].sent
    assert sum(read.stamped for read in reads) >= 0.99 * len(reads)
    for read, piece in zip(reads, last_pieces(reads), strict=True):
        if read.stamped:
            before_ns, after_ns = sent[piece]
            assert before_ns - MS <= read.at_ns <= after_ns + 10 * MS
    assert all(earlier.at_ns <= later.at_ns for earlier, later in pairwise(reads))


@LINUX
def test_a_greenlet_that_blocks_the_loop_does_not_shift_the_stamps(emitter: Emitter) -> None:
    server = emitter.serve(numbered(60, 10))

    def block() -> None:
        while True:
            time.sleep(0.05)
            gevent.sleep(0.013)

    hub().take_longest_away_ns()
    blocking = gevent.spawn(block)
    with closing(connect(server)) as connection:
        connection.send(ASK)
        reads = read_all(connection)
    blocking.kill()
    sent = server.replies()[0].sent
    stamped = [(r, p) for r, p in zip(reads, last_pieces(reads), strict=True) if r.stamped]
    assert len(stamped) >= 0.9 * len(reads)
    for read, piece in stamped:
        before_ns, after_ns = sent[piece]
        assert before_ns - 5 * MS <= read.at_ns <= after_ns + 5 * MS
        # What a read that waited for the loop shares with others is no older than the loop was away.
        first = piece - len(read.data) // PIECE + 1
        assert read.at_ns - sent[first][1] <= read.away_ns + 5 * MS
    assert max(read.away_ns for read, _ in stamped) >= 40 * MS, "the loop was never blocked: the test shows nothing"
    assert hub().take_longest_away_ns() >= 50 * MS


def test_only_long_absences_of_the_loop_add_up_to_its_stalls() -> None:
    def stalled_ns(pause_s: float) -> int:
        gevent.sleep(0.01)
        hub().take_stalled_ns()
        for _ in range(3):
            time.sleep(pause_s)
            gevent.sleep(0)
        gevent.sleep(0.01)
        return hub().take_stalled_ns()

    assert min(stalled_ns(0.01) for _ in range(10)) == 0  # the machine itself may stall now and then
    assert stalled_ns(0.06) >= 3 * 60 * MS


def test_case_41_a_stamp_that_the_wall_clock_cannot_have_made_is_not_believed(emitter: Emitter) -> None:
    """Sources: openvinotoolkit/model_server#1260, sgl-project/sglang#17640."""
    with closing(connect(emitter.serve(numbered(1, 1)))):
        gevent.sleep(0.02)
        for off_s in (-3600, -5, 5, 3600):
            seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
            before_ns = time.monotonic_ns()
            stamp = (socket.SOL_SOCKET, SO_TIMESTAMPNS, struct.pack("@qq", seconds + off_s, nanoseconds))
            read = read_of(b"x", [stamp], hub())
            assert before_ns <= read.at_ns <= time.monotonic_ns()
            assert (read.lag_ns, read.stamped) == (0, False)
        assert read_of(b"x", [], hub()).stamped is False
        assert read_of(b"x", [(socket.SOL_SOCKET, 1, b"odd")], hub()).stamped is False


@LINUX
def test_a_stamp_from_since_the_last_sweep_is_believed(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(1, 1)))):
        wall_ns = time.time_ns()
        time.sleep(0.01)
        stamp = (socket.SOL_SOCKET, SO_TIMESTAMPNS, struct.pack("@qq", *divmod(wall_ns, 1_000_000_000)))
        now_ns = time.monotonic_ns()
        read = read_of(b"x", [stamp], hub())
    assert read.stamped
    assert read.lag_ns >= 10 * MS
    assert read.at_ns + read.lag_ns >= now_ns


# Waiting


def test_reading_waits_until_an_instant_and_no_less(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(1, 150, ending=SILENCE)))) as connection:
        connection.send(ASK)
        until_ns = time.monotonic_ns() + 40 * MS
        connection.wait_until(lambda _: until_ns)
        with pytest.raises(SilenceError):
            connection.read()
        assert time.monotonic_ns() >= until_ns
        with pytest.raises(SilenceError):  # an instant that has passed stays passed
            connection.read()
        connection.wait_until(None)
        read = connection.read()
        assert read is not None
        assert read.data == b"0000001\n"


def test_an_instant_is_not_put_off_by_bytes_that_come(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(400, 5)))) as connection:
        connection.send(ASK)
        until_ns = time.monotonic_ns() + 60 * MS
        connection.wait_until(lambda _: until_ns)
        with pytest.raises(SilenceError):
            read_all(connection)
        assert time.monotonic_ns() >= until_ns


def test_silence_counts_from_the_last_byte(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(12, 80, ending=SILENCE)))) as connection:
        connection.send(ASK)
        connection.wait_until(lambda heard_ns: heard_ns + 700 * MS)
        reads: list[Read] = []
        with pytest.raises(SilenceError):
            read_all(connection, reads)
        silent_ns = time.monotonic_ns() - reads[-1].at_ns
    assert reads[-1].data.endswith(b"0000012\n")
    assert silent_ns >= 700 * MS


def test_what_came_before_the_end_is_read_before_the_end(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(3, 5)))) as connection:
        connection.send(ASK)
        wait_for(lambda: not connection.idle and connection._finished)
        assert b"".join(read.data for read in read_all(connection)) == b"0000001\n0000002\n0000003\n"
        assert connection.read() is None


def test_a_reset_is_a_lost_connection(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(1, 1, ending=RST, end_ms=30)))) as connection:
        connection.send(ASK)
        with pytest.raises(ConnectionLostError, match="reset"):
            read_all(connection)
        assert not connection.idle


def test_a_server_faster_than_the_parser_waits_and_nothing_is_lost(emitter: Emitter) -> None:
    rng = random.Random(0)
    blocks = [rng.randbytes(1_000_000) for _ in range(32)]
    server = emitter.serve(Answer([(0, block) for block in blocks], framing=RAW, ending=CLOSE))
    with closing(connect(server)) as connection:
        connection.send(ASK)
        wait_for(lambda: connection._queued > 4_000_000)
        gevent.sleep(0.1)
        assert connection._queued <= 4_194_304 + 65_536
        assert len(server.replies(0)[0].sent) < len(blocks)
        received = hashlib.sha256()
        while (read := connection.read()) is not None:
            received.update(read.data)
            assert connection._queued <= 4_194_304 + 65_536
    assert received.digest() == hashlib.sha256(b"".join(blocks)).digest()


def test_a_descriptor_beyond_1024_works(emitter: Emitter) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"only {hard} descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.dup(2) for _ in range(1030)]
    try:
        with closing(connect(emitter.serve(numbered(2, 1)))) as connection:
            assert connection._sock.fileno() >= 1024
            connection.send(ASK)
            assert b"".join(read.data for read in read_all(connection)) == b"0000001\n0000002\n"
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_ipv6(emitter: Emitter) -> None:
    try:
        server = emitter.serve(Answer(script(*REF)), host="::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    origin, prefix = origin_of(server.url)
    client = Client(Pool(origin), Timeouts(), None, prefix)
    timeline = stream(client)
    client.pool.close()
    assert (timeline.outcome, timeline.output_tokens) == (Outcome.OK, 4)
    assert f"Host: [::1]:{server.port}\r\n".encode() in server.replies()[0].request


# The pool


def test_the_connection_used_last_is_used_first(emitter: Emitter) -> None:
    server = emitter.serve(numbered(1, 1))
    pool = Pool(Origin(server.host, server.port))
    connections = [connect(server) for _ in range(3)]
    for connection in connections:
        pool.give(connection)
    assert [pool.take(), pool.take(), pool.take(), pool.take()] == [*reversed(connections), None]
    for connection in connections:
        connection.close()


def test_a_connection_that_the_server_closed_is_not_used_again(emitter: Emitter) -> None:
    server = emitter.serve(numbered(1, 1), idle_close_s=0.05)
    pool = Pool(Origin(server.host, server.port))
    connection = connect(server)
    pool.give(connection)
    wait_for(lambda: not connection.idle)
    assert pool.take() is None
    assert connection._sock.fileno() == -1


def test_a_connection_on_which_something_unasked_for_came_is_not_used_again(emitter: Emitter) -> None:
    server = emitter.serve(numbered(2, 60, ending=SILENCE))
    pool = Pool(Origin(server.host, server.port))
    connection = connect(server)
    connection.send(ASK)
    assert connection.read() is not None
    pool.give(connection)
    wait_for(lambda: not connection.idle)
    assert pool.take() is None


def test_connections_are_closed_where_they_are_not_to_be_kept(emitter: Emitter) -> None:
    server = emitter.serve(numbered(1, 1))
    pool = Pool(Origin(server.host, server.port), keep_alive=False)
    connection = connect(server)
    pool.give(connection)
    assert pool.take() is None
    assert connection._sock.fileno() == -1


def test_a_closed_pool_keeps_nothing_open(emitter: Emitter) -> None:
    server = emitter.serve(numbered(1, 1))
    pool = Pool(Origin(server.host, server.port))
    connections = [connect(server) for _ in range(2)]
    for connection in connections:
        pool.give(connection)
    pool.close()
    assert [connection._sock.fileno() for connection in connections] == [-1, -1]
    assert pool.take() is None


@LINUX
def test_more_than_one_read_takes_is_all_stamped(emitter: Emitter) -> None:
    """What a read leaves in its socket is read in a later sweep, and is older than the sweep before that one."""
    size = 180_000
    answer = Answer([(10, b"x" * size)], framing=RAW, ending=CLOSE)
    with closing(connect(emitter.serve(answer))) as connection:
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_000_000)
        connection.send(ASK)
        for _ in range(200):  # blocks the loop until all of it is there
            if waiting_bytes(connection) == size:
                break
            time.sleep(0.05)
        reads = read_all(connection)
    assert sum(len(read.data) for read in reads) == size
    assert len(reads) > 2, "it came in one read: the test shows nothing"
    assert all(read.stamped for read in reads)


@LINUX
def test_what_waited_in_the_socket_of_a_full_connection_is_stamped_too(emitter: Emitter) -> None:
    """Its socket is not read while megabytes wait to be parsed, in which time other sweeps are whole for others."""
    size = 6_000_000
    with closing(connect(emitter.serve(Answer([(10, b"x" * size)], framing=RAW, ending=CLOSE)))) as connection:
        connection.send(ASK)
        with gevent.Timeout(20):
            while not connection._full:
                gevent.sleep(0.01)
        for _ in range(20):  # turns of the loop in which nobody parses
            gevent.sleep(0.01)
        assert waiting_bytes(connection), "nothing waits in the socket: the test shows nothing"
        reads = read_all(connection)
    assert sum(len(read.data) for read in reads) == size
    assert all(read.stamped for read in reads)
    assert hub().full == 0


def waiting_bytes(connection: Connection) -> int:
    """Return how many bytes wait in the kernel."""
    waiting = array("i", [0])
    fcntl.ioctl(connection._sock.fileno(), termios.FIONREAD, waiting)
    return waiting[0]


# TLS


def tls_client(server: Server, *, insecure: bool = False, ca_file: Path | None = None, connect_s: float = 5) -> Client:
    origin, prefix = origin_of(server.url, insecure=insecure, ca_pem=read_ca(str(ca_file)) if ca_file else None)
    return Client(Pool(origin), Timeouts(connect_s=connect_s), None, prefix)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_stream_through_tls_has_the_times_of_its_sending(emitter: Emitter, pem: Path, *, insecure: bool) -> None:
    answer = Answer(script(*REF))
    server = emitter.serve(answer, certificate=pem)
    client = tls_client(server, insecure=insecure, ca_file=None if insecure else pem)
    first, second = stream(client), stream(client)
    client.pool.close()
    replies = server.replies(2)
    assert [reply.connection for reply in replies] == [0, 0], "the connection was not kept"
    assert second.connect_ns is None
    assert first.connect_ns is not None
    late_ns = []
    for timeline, reply in zip((first, second), replies, strict=True):
        assert (timeline.outcome, timeline.message, timeline.output_tokens) == (Outcome.OK, "", 4)
        times, truth = timeline.choices[0].times, [reply.sent[piece] for piece in answer.token_pieces]
        assert all(at_ns >= before_ns - MS for at_ns, (before_ns, _) in zip(times, truth, strict=True))
        late_ns.append(max(at_ns - after_ns for at_ns, (_, after_ns) in zip(times, truth, strict=True)))
    assert min(late_ns) <= 10 * MS  # a machine that is busy now and then gives two pieces one time


def test_a_new_connection_goes_on_with_the_session_of_an_earlier_one(emitter: Emitter, pem: Path) -> None:
    server = emitter.serve(Answer(script(*REF)), certificate=pem)
    client = tls_client(server, ca_file=pem)
    first = client.pool.open(5.0)
    assert first.tls is not None
    assert not first.tls._tls.session_reused
    client.pool.give(first)
    assert stream(client).outcome is Outcome.OK  # on the first, whose answer brings the ticket of its session
    with closing(client.pool.open(5.0)) as second:
        assert second.tls is not None
        assert second.tls._tls.session_reused
    client.pool.close()


def test_events_through_tls_wait_for_each_other_but_the_end_does_not(emitter: Emitter, pem: Path) -> None:
    """Parsed in batches, as without TLS; the last chunk is seen at once: bytes are decrypted where they are read."""
    server = emitter.serve(numbered(40, 5), certificate=pem)
    with closing(tls_client(server, ca_file=pem).pool.open(5.0)) as connection:
        connection.send(ASK)
        connection.patient = True
        wakes, reads = 0, []
        while (read := connection.read()) is not None:
            reads.append(read)
            wakes += not connection._reads
    assert len(reads) >= 20
    assert wakes < len(reads) / 2
    assert all(read.stamped for read in reads) or sys.platform != "linux"


def test_an_unknown_authority_is_a_failed_connection_that_says_why(emitter: Emitter, pem: Path) -> None:
    timeline = stream(tls_client(emitter.serve(Answer(script(*REF)), certificate=pem)))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert "certificate verify failed" in timeline.message


def test_a_name_that_is_not_in_the_certificate_is_refused(emitter: Emitter, pem: Path) -> None:
    server = emitter.serve(Answer(script(*REF)), certificate=pem, host="127.0.0.2")
    timeline = stream(tls_client(server, ca_file=pem))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert "127.0.0.2" in timeline.message


def test_a_server_without_tls_is_a_failed_connection(emitter: Emitter) -> None:
    server = emitter.serve(numbered(1, 1), idle_close_s=0.1)
    origin, _ = origin_of(server.url.replace("http:", "https:"))
    timeline = stream(Client(Pool(origin), Timeouts()))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert "TLS handshake" in timeline.message


def test_a_handshake_that_is_not_answered_ends_in_time(emitter: Emitter) -> None:
    origin, _ = origin_of(emitter.serve(numbered(1, 1)).url.replace("http:", "https:"))
    timeline = stream(Client(Pool(origin), Timeouts(connect_s=0.1)))
    assert timeline.outcome is Outcome.CONNECT_FAILED
    assert timeline.message == "no TLS handshake within 0.1 s"


@pytest.mark.parametrize("end", [CutError, gevent.GreenletExit])
def test_a_request_that_is_cut_in_the_handshake_leaves_no_socket_open(end: type[BaseException]) -> None:
    closed = gevent.event.Event()

    def serve(sock: gevent.socket.socket, _: object) -> None:
        while sock.recv(65_536):
            pass
        closed.set()

    server = gevent.server.StreamServer(("127.0.0.1", 0), serve)
    server.start()
    client = Client(Pool(origin_of(f"https://127.0.0.1:{server.server_port}")[0]), Timeouts())
    streaming = gevent.spawn(stream, client)
    gevent.sleep(0.05)
    if end is CutError:
        client.cut_all()
    else:
        streaming.kill()
    assert closed.wait(5)
    assert not client.in_flight
    server.stop()


# Addresses


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "netloc"),
    [
        ("http://server:8000", "server", 8000, "", "server:8000"),
        ("http://server", "server", 80, "", "server"),
        ("http://server:80/", "server", 80, "", "server"),
        ("https://server", "server", 443, "", "server"),
        ("https://server:8443/v1", "server", 8443, "", "server:8443"),
        ("http://server:8000/v1/", "server", 8000, "", "server:8000"),
        ("http://server/gateway", "server", 80, "/gateway", "server"),
        ("http://server/gateway/v1", "server", 80, "/gateway", "server"),
        ("http://server/a/b/", "server", 80, "/a/b", "server"),
        ("http://server/openai-v1", "server", 80, "/openai-v1", "server"),
        ("HTTP://Server:8000", "server", 8000, "", "server:8000"),
        ("http://[::1]:8000", "::1", 8000, "", "[::1]:8000"),
        ("http://[2001:db8::2]/v1", "2001:db8::2", 80, "", "[2001:db8::2]"),
        ("http://10.0.0.7:65535", "10.0.0.7", 65535, "", "10.0.0.7:65535"),
    ],
)
def test_an_address_is_split_into_host_port_and_prefix(
    url: str, host: str, port: int, prefix: str, netloc: str
) -> None:
    origin, found = origin_of(url)
    assert (origin.host, origin.port, found, origin.netloc) == (host, port, prefix, netloc)
    assert (origin.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        *("", "server", "server:8000", "localhost:8000/v1", "ftp://server", "http://", "http:///v1", "//server"),
        *(
            "http://server:port",
            "http://server:99999",
            "http://server:-1",
            "http://server:0",
            "http://[::1",
            "http://:80",
        ),
    ],
)
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InputError, match="http://my-server:8000") as refused:
        origin_of(url)
    assert repr(url) in str(refused.value)


def test_an_authority_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    for name in ("text.pem", "missing.pem"):
        with pytest.raises(InputError, match=f"--ca-file .*{name}"):
            read_ca(str(tmp_path / name))


def test_a_connection_that_nobody_accepts_is_an_error_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        Connection(Origin("127.0.0.1", port), 1.0)


def test_a_half_closed_answer_ends(emitter: Emitter) -> None:
    with closing(connect(emitter.serve(numbered(2, 1, ending=FIN)))) as connection:
        connection.send(ASK)
        assert b"".join(read.data for read in read_all(connection)) == b"0000001\n0000002\n"
        assert not connection.idle
