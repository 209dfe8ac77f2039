"""A stand-in for the Hugging Face Hub, as far as making a repository, committing to it and downloading from it go."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Hub(ThreadingHTTPServer):
    """One on a free port of this machine.

    Attributes:
        repositories: name -> path -> content; private: names of private ones.
        objects: large files by their SHA-256.
        tokens: that requests came with.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.tokens: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[Hub]:
    """The stand-in, while it runs."""
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.tokens.add(self.headers.get("Authorization", ""))
        if self.headers.get("Authorization") != "Bearer hf_secret":
            return self._json({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] != "me":
                return self._json({"error": "You don't have the rights to create a model here"}, 403)
            if name in hub.repositories:
                return self._json({"error": "You already created this model repo", "url": f"{hub.address}/{name}"}, 409)
            hub.repositories[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(name)
            return self._json({"url": f"{hub.address}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if re.fullmatch(r"/api/models/me/[\w.-]+/preupload/main", self.path):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]
            return self._json({"files": [{**f, "shouldIgnore": False} for f in files]})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"{hub.address}/lfs/{o['oid']}"}}} for o in wanted]
            return self._json({"transfer": "basic", "objects": upload})
        if found := re.fullmatch(r"/api/models/(me/[\w.-]+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repositories[found[1]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repositories[found[1]][value["path"]] = hub.objects[value["oid"]]
            address = f"{hub.address}/{found[1]}/commit/{'0' * 40}"
            return self._json({"success": True, "commitUrl": address, "commitOid": "0" * 40})
        return self._json({"error": f"not known here: {self.path}"}, 404)

    def do_PUT(self) -> None:
        body = self._body()
        self.server.objects[self.path.rpartition("/")[2]] = body
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self._json({})

    def do_GET(self) -> None:
        found = re.fullmatch(r"/(me/[\w.-]+)/resolve/\w+/(.+)", self.path)
        content = self.server.repositories.get(found[1], {}).get(found[2]) if found else None
        if content is None:
            return self._json({"error": "Entry not found"}, 404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    do_HEAD = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub's client talks to a server of this machine, with a token that it knows."""
    with serving() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server
