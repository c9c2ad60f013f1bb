"""A proxy before an S3 server that spoils some of the requests, in the ways in which networks and servers do."""

import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

FAULTS = ("500", "503", "drop", "slow", "cut request", "cut answer", "lost answer")
"""An answer with that status; a hang-up before anything is done; an answer later than the client waits; a hang-up in
the middle of what the client sends, or of what it gets, or after all was done."""


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]


class FaultyS3:
    """Passes requests on to an S3 server, but spoils the next few of a kind."""

    def __init__(self, endpoint: str, *, slow_seconds: float = 2.0) -> None:
        self.endpoint, self.slow_seconds = endpoint, slow_seconds
        self.requests: list[Request] = []
        self.spoilt = 0
        self._faults: list[tuple[str, str, str]] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def spoil(self, fault: str, *, method: str = "", path: str = "", count: int = 1) -> None:
        """Spoil the next `count` requests of a method whose path holds `path`, by default any."""
        with self._lock:
            self.spoilt = 0
            self._faults = [(fault, method, path)] * count

    def fault_of(self, request: Request) -> str | None:
        """What is to go wrong with a request."""
        with self._lock:
            self.requests.append(request)
            if self._faults:
                fault, method, path = self._faults[0]
                if method in {"", request.method} and path in request.path:
                    self.spoilt += 1
                    del self._faults[0]
                    return fault
        return None

    def __enter__(self) -> "FaultyS3":
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ClassVar[FaultyS3]

    def forward(self) -> None:
        fault = self.proxy.fault_of(Request(self.command, self.path, dict(self.headers)))
        self.close_connection = True
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size // 2 if fault == "cut request" else size)
        if fault in {"500", "503"}:
            self.answer(int(fault), {}, b"")
        elif fault not in {"drop", "cut request"}:
            time.sleep(self.proxy.slow_seconds if fault == "slow" else 0)
            reply = self.ask_onward(body)
            if fault != "lost answer":
                self.answer(*reply, half=fault == "cut answer")

    def ask_onward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        onward = HTTPConnection(self.proxy.endpoint.removeprefix("http://"))
        onward.request(self.command, self.path, body, dict(self.headers))
        reply = onward.getresponse()
        content = reply.read()
        onward.close()
        return reply.status, dict(reply.getheaders()), content

    def answer(
        self, status: int, headers: dict[str, str], body: bytes, *, half: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("Content-Length", str(len(body))))
        self.send_header("Connection", "close")
        try:
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if half else body)
        except OSError:  # the client waited no longer
            return

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass
