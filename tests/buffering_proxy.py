"""A proxy that gathers each answer and hands it on in one piece, as one that buffers does: `python … PORT TARGET`."""

import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """One request to the target for each that comes."""

    protocol_version = "HTTP/1.1"
    target = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        names = [name for name in ("Authorization", "Content-Type") if name in self.headers]
        headers = {name: self.headers[name] for name in names}
        request = urllib.request.Request(self.target + self.path, body, headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, kind, content = answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            status, kind, content = error.code, error.headers["Content-Type"], error.read()
        head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        self.wfile.write(head.encode() + content)

    do_GET = do_POST  # noqa: N815 - as above

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    Handler.target = sys.argv[2]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
