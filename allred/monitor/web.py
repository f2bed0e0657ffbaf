"""Serves the page with the state of a job, on loopback: `python -m allred top JOB --web [PORT]`.

    /           the page (page/page.html)
    /events     the states of the job as server-sent events, one per second

Each request needs the token of the address that is printed, and a Host header of this machine, so that neither other
users of the host nor pages of other sites can read the job. A stream of events is connected to the job as long as it
is read: a page that nobody sees costs nothing.
"""

import argparse
import contextlib
import http.server
import io
import json
import os
import secrets
import socket
import sys
import threading
import urllib.parse
from typing import Any

from allred.errors import AllredError
from allred.monitor.state import follow, resolve
from allred.page import render
from allred.runtime.timings import UNAUTHENTICATED_PEERS

_HOSTS = ("127.0.0.1", "localhost")
_REQUEST_BYTES = 2**14  # of a request; a browser sends about 500
_HEADERS = {
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY", "Connection": "close",
}  # fmt: skip


def port(text: str) -> int:
    """Return the value of the option --web."""
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r}")


class PageServer(http.server.ThreadingHTTPServer):
    """Serves a job. name: of the job. port: 0 for a free one. token: the secret. Raises AllredError."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.token = resolve(name), secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise AllredError(
                f"cannot listen on 127.0.0.1 port {port}: {error.strerror}; choose another port"
            ) from None
        self._waiting: list[socket.socket] = []  # connections that have not sent the token, the oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread. Close the oldest one if too many have not sent the token."""
        with self._lock:
            self._waiting.append(request)
            if len(self._waiting) > UNAUTHENTICATED_PEERS:
                with contextlib.suppress(OSError):
                    self._waiting.pop(0).shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # not the end of a connection
            super().handle_error(request, client_address)

    def forget(self, request: Any) -> None:
        """The connection has sent the token, or ends."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(request)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class _LimitedReader(io.RawIOBase):
    """Reads a request. Ends the connection after _REQUEST_BYTES."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, _REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = self._file.read1(min(len(buffer), self._left))
        self._left -= len(data)
        if not self._left:
            raise TimeoutError("the request is too long")  # http.server closes the connection
        buffer[: len(data)] = data
        return len(data)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds of a read or write: then the connection is closed

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_LimitedReader(self.rfile), 2**12)

    def do_GET(self) -> None:
        with contextlib.suppress(OSError, AllredError, ValueError):  # closed; the last state was removed; a wrong URL
            self._get()

    def _get(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        token = urllib.parse.parse_qs(url.query).get("token", [""])[0]
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in _HOSTS or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "403: open the address that `allred top --web` has printed\n")
            return
        self.server.forget(self.request)
        if url.path == "/":
            self._answer(200, "text/html", render(None))
        elif url.path == "/events":
            self._stream()
        else:
            self._answer(404, "text/plain", "404\n")

    def _answer(self, code: int, kind: str, text: str | None) -> None:
        data = None if text is None else text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if data is not None:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data is not None:
            self.wfile.write(data)

    def _stream(self) -> None:
        self._answer(200, "text/event-stream", None)
        sent: dict[str, Any] = {}
        with contextlib.closing(follow(self.server.name)) as states:
            for now in states:
                new = {key: value for key, value in now.items() if key != "scalars" or value != sent.get(key)}
                # A line with a colon is a comment; writing it finds out whether the page is open.
                text = ":" if now == sent else f"data: {json.dumps(new)}"
                self.wfile.write(f"{text}\n\n".encode())
                sent = now

    def log_message(self, *_: object) -> None:
        pass


def serve(name: str, port: int) -> None:
    """Serve a job until Ctrl-C. Raises AllredError."""
    with PageServer(name, port) as server:
        here, tunnel = socket.gethostname(), f"-L {server.server_port}:127.0.0.1:{server.server_port}"
        login = os.environ.get("SLURM_SUBMIT_HOST") or os.environ.get("SGE_O_HOST") or "LOGIN_NODE"
        print(f"job {server.name}: {server.address}")
        print(f"from another machine: ssh {tunnel} {here}")
        print(f"through a login node: ssh -J {login} {tunnel} {here}")
        print("Then open the address there. Ctrl-C ends the page, not the job.", flush=True)
        server.serve_forever()
