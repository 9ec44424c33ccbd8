"""TLS between bytes and bytes: no socket, so that whoever reads ciphertext can note when it came."""

import ssl

from vllm_locust.hub import READ_BYTES


class Tls:
    """The client's side of one TLS connection."""

    def __init__(self, context: ssl.SSLContext, host: str, session: ssl.SSLSession | None) -> None:
        """Name the host (SNI, RFC 6066); a session of an earlier connection spares the handshake its certificates."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host, session=session)
        self.established = False
        self.closed = False
        """Whether the peer has said that nothing more will come."""

    def handshake(self, ciphertext: bytes) -> bytes:
        """Go on with what came from the peer; returns what to send. Raises `ssl.SSLError`."""
        self._incoming.write(ciphertext)
        try:
            self._tls.do_handshake()
            self.established = True
        except ssl.SSLWantReadError:
            pass
        return self._outgoing.read()

    def encrypt(self, plaintext: bytes) -> bytes:
        """Return the ciphertext to send; raises `ssl.SSLError`."""
        self._tls.write(plaintext)
        return self._outgoing.read()

    def decrypt(self, ciphertext: memoryview, buffer: memoryview) -> bytes:
        """Return the plaintext that ciphertext completed, by way of a buffer; raises `ssl.SSLError`."""
        self._incoming.write(ciphertext)
        plaintext = b""
        try:
            while not self.closed:
                size: int = self._tls.read(READ_BYTES, buffer)  # type: ignore[assignment] # bytes without a buffer
                self.closed = not size
                if not self._incoming.pending:  # most reads are one record, and to ask for more costs an exception
                    piece = buffer[:size].tobytes()
                    return plaintext + piece if plaintext else piece
                plaintext += buffer[:size].tobytes()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closed = True
        return plaintext

    @property
    def session(self) -> ssl.SSLSession | None:
        """What a later connection may go on with; servers send it after the handshake."""
        return self._tls.session
