"""A stand-in for the Hub on localhost: just enough of its API to create a repository, push a folder and load it.

Weights go through Git LFS, as on the Hub for clients without Xet: set HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

COMMIT = "c" * 40


class HubServer(ThreadingHTTPServer):
    """The server, with the files of each repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}  # what was uploaded to LFS, by its SHA-256

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(part for part in (request.get("organization") or "me", request["name"]) if part)
            self.server.repositories.setdefault(name, {})
            self._answer({"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            front_matter = json.loads(body)["content"].split("---\n")[1]
            assert isinstance(yaml.safe_load(front_matter), dict)
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            modes = {
                file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular"
                for file in json.loads(body)["files"]
            }
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self._answer({"files": files})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{entry['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").split("/commit/")[0]
            repository = self.server.repositories[name]
            for line in map(json.loads, body.splitlines()):
                file = line["value"]
                if line["key"] == "file":
                    repository[file["path"]] = base64.b64decode(file["content"])
                elif line["key"] == "lfsFile":
                    repository[file["path"]] = self.server.objects[file["oid"]]
            commit = {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            self._answer(commit)
        else:
            self._refuse()

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.removeprefix("/lfs/")
        if hashlib.sha256(content).hexdigest() != oid:
            self._refuse()
            return
        self.server.objects[oid] = content
        self._head(200, b"")

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            name = "/".join(self.path.removeprefix("/api/models/").partition("?")[0].split("/")[:2])
            files = [{"rfilename": path} for path in self.server.repositories.get(name, ())]
            self._answer({"id": name, "sha": COMMIT, "siblings": files})
            return
        content = self._file()
        if content is None:
            self._refuse()
            return
        self._head(200, content)
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _file(self) -> bytes | None:
        name, found, path = self.path.strip("/").partition("/resolve/")
        return self.server.repositories.get(name, {}).get(path.partition("/")[2]) if found else None

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._head(200, body)
        self.wfile.write(body)

    def _refuse(self) -> None:
        self._head(404, b"", error="EntryNotFound")

    def _head(self, status: int, body: bytes, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", hashlib.sha256(body).hexdigest())
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Write nothing: a test's output is its own."""


@contextmanager
def local_hub() -> Iterator[HubServer]:
    """Yield a running stand-in; a process uses it with HF_ENDPOINT set to its url."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
