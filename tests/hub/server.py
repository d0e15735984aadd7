# SPDX-License-Identifier: MIT OR Apache-2.0
"""A server on this machine that speaks as much of the Hugging Face Hub's protocol as downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

_API: Final = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
_FILE: Final = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True)
class Refusal:
    """A status, and the Hub's own name for the error."""

    status: int
    code: str = ""


@dataclass
class Repository:
    """Files by commit, and the commits of branches and tags."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]


@dataclass
class FakeHub:
    """Serves repositories; a context manager.

    Attributes
    ----------
    refuse : dict of str to Refusal
        What is answered about a file, or about ``"api"``.
    cut : dict of str to int
        Files whose next answer ends after so many bytes.
    stall : set of str
        Files of which half comes, and the rest when ``resume`` is set.
    asked : list of str
        Every request: its method, its path, and the range asked for.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    refuse: dict[str, Refusal] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    resume: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make ``files`` what a revision has; return the commit."""
        repository = self.repositories.setdefault(name, Repository({}, {}))
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.refs[revision] = commit
        return commit

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloaded(self) -> list[str]:
        """Return the names of files whose contents were asked for, in order."""
        return [
            path.split("/")[-1].split(" ")[0] for path in self.asked if path.startswith("GET") and "/api/" not in path
        ]


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.served, unquote(self.path.partition("?")[0])
        wanted = self.headers.get("Range")
        hub.asked.append(f"{self.command} {path}" + (f" {wanted}" if wanted else ""))
        api, file = _API.fullmatch(self.path), _FILE.fullmatch(self.path)
        found = api or file
        if found is None:
            return self._refuse(Refusal(404))
        refusal = hub.refuse.get("api" if api else unquote(file["file"]) if file else "")
        if refusal is not None:
            return self._refuse(refusal)
        repository = hub.repositories.get(found["name"])
        if repository is None:
            return self._refuse(Refusal(401, "RepoNotFound"))
        revision = unquote(found["revision"] or "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(Refusal(404, "RevisionNotFound"))
        files = repository.commits[commit]
        if file is None:
            listed = {"id": found["name"], "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            return self._send(json.dumps(listed).encode(), {"Content-Type": "application/json"}, 200)
        data = files.get(unquote(file["file"]))
        if data is None:
            return self._refuse(Refusal(404, "EntryNotFound"), {"X-Repo-Commit": commit})
        return self._send_file(unquote(file["file"]), data, commit, body=body)

    def _send_file(self, name: str, data: bytes, commit: str, *, body: bool) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start, status = 0, 200
        if (span := self.headers.get("Range")) is not None:
            start, status = int(span.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if not body:
            return self._send(data, headers, status, body=False)
        cut = self.served.cut.pop(name, None)
        if cut is not None:
            self._send(data[start:], headers, status, body=False)
            self.wfile.write(data[start : start + cut])
            self.close_connection = True
            return None
        if name in self.served.stall:
            self._send(data[start:], headers, status, body=False)
            half = len(data) // 2
            self.wfile.write(data[start:half])
            self.wfile.flush()
            self.served.stalled.set()
            self.served.resume.wait(60.0)
            self.close_connection = True
            return None
        return self._send(data[start:], headers, status)

    def _refuse(self, refusal: Refusal, headers: Mapping[str, str] | None = None) -> None:
        code = {"X-Error-Code": refusal.code} if refusal.code else {}
        self._send(b"", {**code, **(headers or {})}, refusal.status)

    def _send(self, data: bytes, headers: Mapping[str, str], status: int, *, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)
