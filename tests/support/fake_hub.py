"""A Hugging Face hub on this machine: repositories, commits and files, as much of its protocol as an upload takes."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"


@dataclass
class FakeHub:
    """A hub; a context manager. Everything is uploaded as regular files.

    Attributes:
        files: The content of each repository's files.
        commits: The message of every commit.
        created: What was asked for when a repository was made.
        requests: Every request's method and path.
        fails: Parts of paths that it refuses.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    fails: tuple[str, ...] = ()

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            hub_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """Its address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    hub_of: FakeHub

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """Knows who a token's user is, and nothing else."""
        self._read()
        if self._refused():
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        else:
            self._answer({"error": f"unknown: {self.path}"}, 404)

    def _refused(self) -> bool:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known:
            self._answer({"error": "Invalid credentials"}, 401)
        return not known

    def do_POST(self) -> None:
        """Makes a repository, says how files are sent, or takes a commit."""
        body, hub = self._read(), self.hub_of
        if self._refused():
            return None
        if any(part in self.path for part in hub.fails):
            return self._answer({"error": "no room"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.created.append(asked)
            hub.files.setdefault(name, {})
            return self._answer({"url": f"{hub.endpoint}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            valid = content.startswith("---\n")
            problem = {"errors": [{"message": "no metadata"}], "warnings": []}
            return self._answer(
                {"errors": [], "warnings": []} if valid else problem, 200 if valid else 400
            )
        if "/branch/" in self.path:
            return self._answer({})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            regular = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return self._answer({"files": regular})
        if "/commit/" in self.path:
            return self._answer(self._commit(body))
        return self._answer({"error": f"unknown: {self.path}"}, 404)

    def _commit(self, body: bytes) -> dict[str, Any]:
        name = "/".join(self.path.split("/")[3:5])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub_of.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.hub_of.files[name][value["path"]] = base64.b64decode(value["content"])
        number = len(self.hub_of.commits)
        url = f"{self.hub_of.endpoint}/{name}/commit/{number:040x}"
        return {"success": True, "commitOid": f"{number:040x}", "commitUrl": url}

    def _read(self) -> bytes:
        self.hub_of.requests.append(f"{self.command} {self.path}")
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        parts = []  # a body of unknown length comes in chunks
        while "chunked" in self.headers.get("Transfer-Encoding", ""):
            size = int(self.rfile.readline(), 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if not size:
                break
        return b"".join(parts)

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
