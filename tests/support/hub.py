"""A Hugging Face hub on this machine: repositories are folders, and the libraries talk to it over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


class LocalHub:
    """Serves root/models/org/name and root/datasets/org/name; counts the requests it gets."""

    def __init__(self, root: Path, url: str):
        self.root, self.url = root, url
        self.requests: list[str] = []

    def add(self, kind: str, name: str, files: dict[str, bytes]) -> Path:
        folder = self.root / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return folder


def commit_of(folder: Path) -> str:
    """The revision: a digest of the content."""
    content = b"".join(file.name.encode() + file.read_bytes() for file in sorted(folder.iterdir()))
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(root: Path) -> Iterator[LocalHub]:
    hub: LocalHub

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            api, parts = path.startswith("/api/"), path.removeprefix("/api").strip("/").split("/")
            kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
            folder, rest = hub.root / kind / "/".join(parts[:2]), parts[2:]
            if not folder.is_dir():
                return self._send(404, b"{}", **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            commit = commit_of(folder)
            if not api:
                return self._send_file(folder / "/".join(rest[2:]), commit)
            files = [
                {"type": "file", "path": file.name, "rfilename": file.name, "size": file.stat().st_size, "oid": commit}
                for file in sorted(folder.iterdir())
            ]
            if rest and rest[0] == "revision" and rest[1] not in ("main", commit):
                return self._send(404, b"{}", **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Revision not found"})
            if rest and rest[0] == "tree":
                return self._send(200, json.dumps(files).encode())
            info = {"id": "/".join(parts[:2]), "sha": commit, "siblings": files, "private": False, "tags": [], "downloads": 0}
            return self._send(200, json.dumps(info).encode())

        def _send_file(self, file: Path, commit: str) -> None:
            if not file.is_file():
                return self._send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            etag = f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'
            return self._send(200, file.read_bytes(), ETag=etag, **{"X-Repo-Commit": commit})

        def _send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = LocalHub(root, f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let the libraries use the hub at `url` and empty caches."""
    import datasets
    from huggingface_hub import constants

    from plaudit import hub
    from plaudit.data import hub_datasets

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", cache / "modules")
    forget(hub._download, hub_datasets._load)


def forget(*functions: object) -> None:
    """As in a new process."""
    from plaudit import hub

    hub._looked_up.clear()
    for function in functions:
        function.cache_clear()  # pyright: ignore
