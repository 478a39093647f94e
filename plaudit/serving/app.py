"""The HTTP API: its paths, error responses and OpenAPI description (`/docs`, `/openapi.json`)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp

from plaudit import __version__
from plaudit.data.rollouts import parse_group, with_token_counts
from plaudit.errors import DataError, did_you_mean, redact
from plaudit.report.progress import print_line
from plaudit.rewards.reward import last_line
from plaudit.serving.admission import CLIENT_CLOSED_REQUEST, PUBLIC_PATHS, AdmissionControl, Limits, error_response
from plaudit.serving.metrics import CONTENT_TYPE
from plaudit.serving.schemas import Error, Health, Item, Problem, Rewards, ScoreRequest, ScoreResponse, dump, parse
from plaudit.serving.service import ClientDisconnected, Service, scored_item
from plaudit.types import Group

DESCRIPTION = """A recipe's rewards. `POST /score` responds when all items are scored, `POST /score/stream` line by line.

Every response gets a result: a reward with its parts, or a failure with its cause, never a hidden zero."""
MAX_PROBLEMS = 20
"""Problems listed per request."""
REFERENCE = "#/components/schemas/{model}"
MAX_INLINE_PARSE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop; larger ones on a thread, so that other requests do not wait."""
ERRORS = {
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "The body is larger than --max-body-bytes.",
    422: "The request is invalid; `problems` lists where.",
    429: "--max-in-flight requests are in flight.",
    500: "Internal error of the service.",
    503: "The service is starting or stopping.",
}


class JsonLines(Response):
    media_type = "application/x-ndjson"


class Metrics(Response):
    media_type = "text/plain"


class _StrictRequest(Request):
    """A request with strict JSON: no NaN, no numbers beyond a float's range, bounded nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return parse(body) if len(body) <= MAX_INLINE_PARSE_BYTES else await asyncio.to_thread(parse, body)
        except ValueError as problem:
            raise _InvalidRequest([{"where": "body", "message": f"is not valid JSON: {problem}"}]) from None


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _InvalidRequest(HTTPException):
    """Status 422 with a list of problems."""

    def __init__(self, problems: Sequence[dict[str, str]]):
        super().__init__(422)
        self.problems = problems


def make_app(
    service: Service, limits: Limits, *, token: str | None = None, count_tokens: Callable[[str], int] | None = None
) -> ASGIApp:
    """`count_tokens`: counts the tokens of responses sent without their count."""
    app = FastAPI(title="plaudit serve", version=__version__, description=DESCRIPTION, redoc_url=None)
    app.router.route_class = _StrictRoute

    @app.get("/health", responses={503: {"model": Health, "description": "Starting or stopping."}}, response_model=Health)
    async def health() -> Response:
        """Whether the service accepts requests. No token needed."""
        body = {"state": service.state, "version": __version__}
        return Response(dump(body), 200 if service.state == "ready" else 503, media_type="application/json")

    @app.get("/rewards", response_model=Rewards)
    async def rewards() -> Response:
        """The rewards and their settings in the recipe."""
        return Response(dump({"rewards": service.describe_rewards()}), media_type="application/json")

    @app.get("/metrics", response_class=Metrics)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(service.state), headers={"Content-Type": CONTENT_TYPE})

    @app.post("/score", response_model=ScoreResponse, responses=_error_responses())
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores of all items, in order, once the last one is scored."""
        groups = await _groups(body, limits.max_items, count_tokens)
        items: list[Any] = [None] * len(groups)
        try:
            async with aclosing(service.score(groups, _wait_for_disconnect(request))) as scored:
                async for i, outcome in scored:
                    items[i] = scored_item(groups[i], outcome, i, body.items[i].id, details=body.details)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(dump({"items": items}), media_type="application/json")

    @app.post("/score/stream", response_class=JsonLines, responses=_error_responses())
    async def score_stream(body: ScoreRequest, request: Request) -> Response:
        """The same as JSON lines: one ScoredItem per line as soon as it is scored, identified by `index`."""
        groups = await _groups(body, limits.max_items, count_tokens)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async with aclosing(service.score(groups, _wait_for_disconnect(request))) as scored:
                    async for i, outcome in scored:
                        yield dump(scored_item(groups[i], outcome, i, body.items[i].id, details=body.details)) + b"\n"
            except ClientDisconnected:
                return

        return StreamingResponse(lines(), media_type=JsonLines.media_type)

    _add_error_handlers(app)
    openapi = _openapi(app, limits, token is not None)
    app.openapi = lambda: openapi
    return AdmissionControl(app, service, limits, token, [*openapi["paths"], *PUBLIC_PATHS])


async def _groups(request: ScoreRequest, max_items: int, count: Callable[[str], int] | None) -> list[Group]:
    if len(request.items) > max_items:
        message = f"{len(request.items):,} items exceed the limit of {max_items:,}; send fewer, or start with a larger --max-items"
        raise _InvalidRequest([{"where": "items", "message": message}])

    def make_groups() -> list[Group]:
        return [with_token_counts(_group(item, i), count) for i, item in enumerate(request.items)]

    return make_groups() if count is None else await asyncio.to_thread(make_groups)


def _group(item: Item, index: int) -> Group:
    where = f"items.{index}"
    try:
        return parse_group(item.row(), str(index), where)
    except DataError as problem:
        raise _InvalidRequest([{"where": where, "message": str(problem).removeprefix(f"{where}: ")}]) from None


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Errors --------------------------------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems = [_problem(detail) for detail in error.errors()]
        if not request.headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json"):
            problems = [{"where": "body", "message": "should be sent as Content-Type: application/json"}]
        return _unreadable(problems)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        if isinstance(error, _InvalidRequest):
            return _unreadable(error.problems)
        causes = {404: "no_such_path", 405: "no_such_method"}
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, causes.get(error.status_code, "refused"), message, headers=error.headers)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        message = redact(last_line(error))
        print_line(f"serve: {request.method} {request.url.path}: {message}", "red")
        return error_response(500, "exception", message)


def _unreadable(problems: Sequence[dict[str, str]]) -> Response:
    first, more = problems[0], len(problems) - 1
    message = f"{first['where']}: {first['message']}" + (f" (and {more} more)" if more else "")
    return error_response(422, "unreadable", message, problems[:MAX_PROBLEMS])


def _problem(detail: Any) -> dict[str, str]:
    """A pydantic error as location (without union tags) and message."""
    *outer, last = [str(part) for part in detail["loc"][1:] if not str(part).startswith("<")] or ["body"]
    where = ".".join([*outer, last])
    if detail["type"] == "extra_forbidden":
        fields = Item.model_fields if "items" in outer else ScoreRequest.model_fields
        return {"where": where, "message": f"is not a field.{did_you_mean(last, fields)}"}
    if detail["type"] == "missing":
        return {"where": where, "message": "is missing"}
    return {"where": where, "message": _lower_first(detail["msg"].removeprefix("Input "))}


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


# OpenAPI -------------------------------------------------------------------------------------------------------------


def _openapi(app: FastAPI, limits: Limits, secured: bool) -> dict[str, Any]:
    """OpenAPI description with this server's item limit and, if it needs a token, its security scheme."""
    openapi = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = openapi["components"]["schemas"]
    schemas |= {model.__name__: model.model_json_schema(ref_template=REFERENCE) for model in (Problem, Error)}
    schemas["Error"].pop("$defs")
    schemas["ScoreRequest"]["properties"]["items"]["maxItems"] = limits.max_items
    if secured:
        openapi["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operation in _operations(openapi):
            if path not in PUBLIC_PATHS:
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _error_schema(401)
    return openapi


def _error_responses() -> dict[int | str, dict[str, Any]]:
    return {status: _error_schema(status) for status in ERRORS if status != 401}


def _error_schema(status: int) -> dict[str, Any]:
    """Errors are JSON on every path; FastAPI would declare the stream's as JSON lines."""
    schema = {"$ref": REFERENCE.format(model="Error")}
    return {"description": ERRORS[status], "content": {"application/json": {"schema": schema}}}


def _operations(openapi: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    return [(path, operation) for path, methods in openapi["paths"].items() for operation in methods.values()]
