"""A server on this machine that answers as the Hugging Face hub does, for one model whose files lie in a directory."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MODEL = "harbor/heron-7b"
BRANCH = "main"


class Hub:
    """The served model, and how many bytes of each file were sent."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.sent: Counter[str] = Counter()

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for path in sorted(self.directory.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that let a process use this hub, with its cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


@contextmanager
def served_model(directory: Path) -> Iterator[Hub]:
    """Serve the files directly in `directory` as the model MODEL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            _answer(self, hub)

        def do_GET(self) -> None:
            _answer(self, hub)

        def do_POST(self) -> None:
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            _send_json(self, [_entry(hub, name) for name in wanted["paths"]])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(directory, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _answer(handler: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = unquote(urlsplit(handler.path).path)
    revisions = f"({BRANCH}|{hub.commit})"
    if re.fullmatch(rf"/api/models/{MODEL}(/revision/{revisions})?", path):
        names = sorted(file.name for file in hub.directory.iterdir())
        siblings = [{"rfilename": name} for name in names]
        _send_json(handler, {"id": MODEL, "sha": hub.commit, "siblings": siblings, "tags": []})
    elif re.fullmatch(rf"/api/models/{MODEL}/tree/{revisions}/?", path):
        _send_json(handler, [_entry(hub, file.name) for file in sorted(hub.directory.iterdir())])
    elif match := re.fullmatch(rf"/{MODEL}/resolve/{revisions}/([^/]+)", path):
        _send_file(handler, hub, match[2])
    else:
        handler.send_response(404)
        handler.send_header("X-Error-Code", "RepoNotFound")
        handler.send_header("Content-Length", "0")
        handler.end_headers()


def _entry(hub: Hub, name: str) -> dict[str, Any]:
    path = hub.directory / name
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _oid(path)}


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


def _send_file(handler: BaseHTTPRequestHandler, hub: Hub, name: str) -> None:
    content = (hub.directory / name).read_bytes()
    start, stop = 0, len(content)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    if asked:
        start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
    handler.send_response(206 if asked else 200)
    handler.send_header("Content-Length", str(stop - start))
    handler.send_header("Accept-Ranges", "bytes")
    if asked:
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
    handler.send_header("ETag", f'"{_oid(hub.directory / name)}"')
    handler.send_header("X-Repo-Commit", hub.commit)
    handler.end_headers()
    if handler.command == "GET":
        hub.sent[name] += stop - start
        handler.wfile.write(content[start:stop])


def _send_json(handler: BaseHTTPRequestHandler, value: Any) -> None:
    content = json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
