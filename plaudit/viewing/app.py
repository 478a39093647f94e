"""The pages and what they show, over HTTP: read-only. The pages are public; what is in a run needs the token, if there is one."""

import hmac
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi import Path as PathParameter
from fastapi import Query as QueryParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from plaudit.errors import PlauditError
from plaudit.report.pages import ASSETS, read_asset
from plaudit.serving.listening import is_loopback
from plaudit.viewing.search import Query, search
from plaudit.viewing.sources import NotThere
from plaudit.viewing.viewer import Viewer

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PORT = re.compile(r"(?<=[\w\]]):\d*$")
Row = Annotated[int, PathParameter(ge=0, lt=1 << 31)]
FirstRow = Annotated[int, QueryParameter(ge=0, lt=1 << 31)]


def make_app(viewer: Viewer, *, token: str | None = None, local_only: bool = True) -> FastAPI:
    """`local_only`: answer requests for this machine's own names only. Otherwise a website whose name is made to point here could
    read the runs through its visitor's browser."""
    app = FastAPI(title="plaudit view", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        host = PORT.sub("", request.headers.get("host", ""))
        if local_only and not is_loopback(host.strip("[]").lower()):
            return _error(403, f"this server answers requests for 127.0.0.1 only, not for {host[:80]!r}")
        if token is not None and request.url.path.startswith("/api/") and not _knows(request, token):
            return _error(401, "this server needs its token")
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(NotThere)
    def not_there(request: Request, error: NotThere) -> Response:
        return _error(404, str(error))

    @app.exception_handler(PlauditError)
    def refused(request: Request, error: PlauditError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        return _error(400, f"{found['loc'][-1]} {str(found['input'])[:80]!r}: {found['msg']}")

    @app.get("/")
    def page() -> Response:
        return Response(read_asset("index.html"), media_type="text/html; charset=utf-8")

    @app.get("/page/{name}")
    def asset(name: str) -> Response:
        if name not in ASSETS:
            return _error(404, f"there is no {name}")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(read_asset(name), media_type=f"{kind}; charset=utf-8")

    @app.get("/api/runs")
    def runs() -> Response:
        return as_json(viewer.runs())

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: int) -> Response:
        return as_json(viewer.metrics(run))

    @app.get("/api/runs/{run}/steps")
    def steps(run: int) -> Response:
        return as_json(viewer.steps(run))

    @app.get("/api/runs/{run}/diagnostics")
    def diagnostics(run: int) -> Response:
        return as_json(viewer.diagnostics(run))

    @app.get("/api/runs/{run}/prompt")
    def prompt(run: int, id: str) -> Response:
        return as_json(viewer.same_prompt(run, id))

    @app.get("/api/runs/{run}/search")
    def find(
        run: int, text: str = "", is_regex: bool = False, split: str = "train", data_source: str = "", least: float | None = None,
        greatest: float | None = None, failure: str = "", step: int | None = None, until: int | None = None, row: FirstRow = 0,
    ) -> Response:  # fmt: skip
        _require_split(split)
        query = Query(text, is_regex, split, data_source, least, greatest, failure, step, until, row)
        return as_json(search(viewer.source(run), query))

    @app.get("/api/runs/{run}/{split}/{step}")
    def step(run: int, split: str, step: int, row: FirstRow = 0) -> Response:
        _require_split(split)
        return as_json(viewer.step(run, split, step, row))

    @app.get("/api/runs/{run}/{split}/{step}/{row}")
    def sample(run: int, split: str, step: int, row: Row) -> Response:
        _require_split(split)
        return as_json(viewer.sample(run, split, step, row))

    @app.get("/api/runs/{run}/{split}/{step}/{row}/tokens")
    def tokens(run: int, split: str, step: int, row: Row) -> Response:
        _require_split(split)
        return as_json(viewer.tokens(run, split, step, row))

    return app


def _require_split(split: str) -> None:
    if split not in ("train", "val"):
        raise NotThere(f"there are train and val samples, not {split[:40]!r}")


def _knows(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def as_json(value: Any) -> Response:
    # Parquet holds any text, UTF-8 does not: an unpaired surrogate is written as an escape.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return Response(text.encode("utf-8", "backslashreplace"), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return Response(json.dumps({"message": message}), status, HEADERS, media_type="application/json")
