"""A small stand-in of the Hugging Face hub, over HTTP: repositories of local files, some of them gated or private, and
downloads that a test pauses or breaks off.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_FILE = re.compile(r"/(?P<model>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<model>[^/]+/[^/]+?)(?P<rest>/(revision|tree)/.*)?")
_PIECE = 64 << 10


@dataclass
class Repository:
    """token: without it the hub answers as it does for a gated (or private) repository."""

    files: Mapping[str, bytes]
    token: str = ""
    private: bool = False
    missing: frozenset[str] = frozenset()  # listed, but not there


@dataclass
class Hub:
    """url: its HF_ENDPOINT. Bytes of weights beyond `allowed_bytes` of a file wait until `release` is set."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    tokens: set[str] = field(default_factory=set)  # that were sent
    allowed_bytes: int = 1 << 40
    release: threading.Event = field(default_factory=threading.Event)
    break_after: list[int] = field(default_factory=list)  # bytes after which a connection is closed, one for each

    def add(self, model: str, folder: Path, **changes: Any) -> None:
        files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        self.repositories[model] = Repository(files, **changes)


@contextmanager
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            self._refuse(404, "")

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            found.requests.append((self.command, path, self.headers.get("Range", "")))
            match = _FILE.fullmatch(path) or _API.fullmatch(path)
            repository = found.repositories.get(match["model"]) if match else None
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token:
                found.tokens.add(token)
            if match is None or repository is None:
                self._refuse(404, "RepoNotFound")
            elif repository.token and token != repository.token and (repository.private or match.re is _FILE):
                code = "RepoNotFound" if repository.private else "GatedRepo"
                self._refuse(403 if token and not repository.private else 401, code)
            elif match.re is _API:
                self._describe(match["model"], repository, "/tree/" in (match["rest"] or ""))
            elif match["file"] not in repository.files or match["file"] in repository.missing:
                self._refuse(404, "EntryNotFound")
            else:
                self._send_file(match["file"], repository.files[match["file"]], body)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
                self.send_header("X-Error-Message", f"refused: {code}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _describe(self, model: str, repository: Repository, tree: bool) -> None:
            entries = [_entry(name, content) for name, content in repository.files.items()]
            info = {"id": model, "modelId": model, "sha": COMMIT, "private": False, "tags": [], "downloads": 0}
            siblings = [
                {**entry, "rfilename": entry["path"], "blobId": entry["oid"], "lfs": _lfs(entry)} for entry in entries
            ]
            self._send_json(entries if tree else {**info, "siblings": siblings})

        def _send_json(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _send_file(self, name: str, content: bytes, body: bool) -> None:
            ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(ranged[1]) if ranged else 0
            self.send_response(206 if ranged else 200)
            self.send_header("ETag", f'"{_etag(name, content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if ranged:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if body:
                self._send_slowly(name, content, start)

        def _send_slowly(self, name: str, content: bytes, start: int) -> None:
            weights = name.endswith(".safetensors")
            end = start + found.break_after.pop(0) if weights and found.break_after else len(content)
            for at in range(start, min(end, len(content)), _PIECE):
                if weights and at >= found.allowed_bytes:
                    found.release.wait()
                self.wfile.write(content[at : min(at + _PIECE, end)])
                self.wfile.flush()
            if end < len(content):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.release.set()
        server.shutdown()
        server.server_close()


def _etag(name: str, content: bytes) -> str:
    """As the hub has it: SHA-256 of files in LFS, else a blob's id."""
    return (hashlib.sha256 if name.endswith(".safetensors") else hashlib.sha1)(content).hexdigest()


def _lfs(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a file in the model's description, where its hash has another name than in the tree."""
    lfs = entry.get("lfs")
    return {**lfs, "sha256": lfs["oid"]} if lfs else None


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(content).hexdigest()
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 130}
    return entry
