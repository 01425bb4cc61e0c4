"""A file server on a free port that can break off, ignore ranges, and count what it was asked for."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Server:
    content: bytes
    break_after: int | None = None
    """Send this many bytes of an answer, then close the connection; once for each entry of `breaks`."""
    breaks: int = 0
    ranges: bool = True
    port: int = 0
    asked: list[str | None] = field(default_factory=list)
    """The Range header of each request."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/file"


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.asked.append(asked)
            match = re.fullmatch(r"bytes=(\d+)-", asked or "")
            first = int(match.group(1)) if match and server.ranges else 0
            if first and first >= len(server.content):
                self.send_error(416)
                return
            body = server.content[first:]
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if server.breaks and server.break_after is not None:
                server.breaks -= 1
                body = body[: server.break_after]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
