"""A local HTTP server that answers as the Hugging Face hub does, for `HF_ENDPOINT`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40


class FakeHub:
    """`repositories`: the files of each, by name; "gated" or "private" in place of files refuses.

    `gets`: the paths of files that were asked for with GET, that is, downloaded."""

    def __init__(self, repositories: dict[str, dict[str, bytes] | str]) -> None:
        self.repositories = repositories
        self.gets: list[str] = []
        self.revisions: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body=with_body)
        else:
            self._refuse(404, "EntryNotFound", "Entry not found")

    def _files(self, name: str) -> dict[str, bytes] | None:
        """The files of a repository; None after an answer that refuses it."""
        found = self.hub.repositories.get(name)
        if found == "gated":
            message = (
                f"Access to model {name} is restricted. You must be authenticated to access it."
            )
            self._refuse(401, "GatedRepo", message)
        elif found is None or isinstance(found, str):
            self._refuse(401, "RepoNotFound", "Repository not found")
        else:
            return found
        return None

    def _list(self, name: str, rest: list[str]) -> None:
        files = self._files(name)
        if files is None:
            return
        revision = rest[1] if len(rest) > 1 else "main"
        self.hub.revisions.append(revision)
        if revision not in ("main", "v2", COMMIT, OTHER_COMMIT):
            self._refuse(404, "RevisionNotFound", "Revision not found")
            return
        commit = OTHER_COMMIT if revision in ("v2", OTHER_COMMIT) else COMMIT
        if rest and rest[0] == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
            self._send(200, json.dumps(entries).encode(), {"X-Repo-Commit": commit})
            return
        siblings = [{"rfilename": path} for path in files]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False}
        self._send(200, json.dumps(info).encode(), {"X-Repo-Commit": commit})

    def _file(self, name: str, revision: str, path: str, *, with_body: bool) -> None:
        files = self._files(name)
        if files is None:
            return
        if path not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if with_body:
            self.hub.gets.append(path)
        headers = {"ETag": f'"{_etag(files[path])}"', "X-Repo-Commit": revision}
        self._send(200, files[path], headers, with_body=with_body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
