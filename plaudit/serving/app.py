"""The HTTP API: its paths, error responses and OpenAPI description (`/docs`, `/openapi.json`)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from plaudit import __version__
from plaudit.data.rollouts import parse_group, with_token_counts
from plaudit.errors import DataError, did_you_mean
from plaudit.redaction import redact
from plaudit.report.progress import print_line
from plaudit.rewards.reward import LONG_TEXT, last_line
from plaudit.serving.admission import CLIENT_CLOSED_REQUEST, IS_SMALL, PUBLIC_PATHS, AdmissionControl, Limits, error_response
from plaudit.serving.metrics import CONTENT_TYPE
from plaudit.serving.schemas import (
    Error,
    Health,
    InvalidFields,
    Item,
    Problem,
    Rewards,
    ScoreRequest,
    ScoreResponse,
    dump,
    dump_by_value,
    parse,
)
from plaudit.serving.service import ClientDisconnected, Service, scored_responses
from plaudit.turns import turns
from plaudit.types import Failure, Group, ScoredGroup

DESCRIPTION = """A recipe's rewards. `POST /score` responds when all items are scored, `POST /score/stream` line by line.

Every response gets a result: a reward with its parts, or a failure with its cause, never a hidden zero."""
MAX_PROBLEMS = 20
"""Problems listed per request."""
REFERENCE = "#/components/schemas/{model}"
WRITTEN_AT_ONCE = 64
"""Responses of an answer; one, if it comes with details."""
SENT_AT_ONCE = 256 * 1024
"""Bytes of an answer: what the client has not received yet is moved in memory with every part that is sent."""
LARGEST_AT_ONCE = 2
"""Requests with the largest number of responses that may be in flight at the same time."""
ERRORS = {
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "The body is larger than --max-body-bytes, or has too many values.",
    422: "The request is invalid; `problems` lists where.",
    429: "--max-in-flight requests are in flight, or too many responses.",
    500: "Internal error of the service.",
    503: "The service is starting or stopping.",
}


class JsonLines(Response):
    media_type = "application/x-ndjson"


class Metrics(Response):
    media_type = "text/plain"


class _InParts(Response):
    """A response that is never in one piece: joining tens of megabytes takes tens of milliseconds."""

    def __init__(self, parts: Sequence[bytes], media_type: str):
        super().__init__(media_type=media_type, headers={"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in _sendable(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})


def _sendable(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same in parts of up to `SENT_AT_ONCE`."""
    waiting = bytearray()
    for part in parts:
        for start in range(0, len(part), SENT_AT_ONCE):
            if waiting and len(waiting) + len(part) > SENT_AT_ONCE:
                yield bytes(waiting)
                waiting.clear()
            waiting += part[start : start + SENT_AT_ONCE]
    yield bytes(waiting)


class _StrictRequest(Request):
    """A request with strict JSON: no NaN, no numbers beyond a float's range, bounded nesting."""

    limits: Limits

    async def json(self) -> ScoreRequest:
        """Parsed and validated here, off the event loop if it is large: FastAPI, which passes it on, would do it on the loop."""
        body, turn = await self.body(), turns()
        await turn.take()
        if self.scope[IS_SMALL]:
            return _read(body, self.limits)
        return await turn.in_thread(_read, body, self.limits, by_value=True)


class _StrictRoute(APIRoute):
    limits: Limits

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            strict.limits = self.limits
            return await handle(strict)

        return handle_strictly


def _read(body: bytes, limits: Limits, *, by_value: bool = False) -> ScoreRequest:
    try:
        value = parse(body, by_value=by_value)
    except ValueError as problem:
        raise _InvalidRequest([{"where": "body", "message": f"is not valid JSON: {problem}"}]) from None
    items = value.get("items") if isinstance(value, dict) else None
    if isinstance(items, list):
        _require_at_most(limits.max_items, len(items), "items", "--max-items")
        responses = [item.get("responses") for item in items if isinstance(item, dict)]
        count = sum(len(one) for one in responses if isinstance(one, list))
        _require_at_most(limits.max_responses, count, "responses", "--max-responses")
    try:
        return ScoreRequest.validate_items(value, MAX_PROBLEMS)
    except InvalidFields as invalid:
        raise _InvalidRequest([_problem({**one, "loc": ("body", *one["loc"])}) for one in invalid.problems]) from None


def _require_at_most(limit: int, count: int, what: str, option: str) -> None:
    if count > limit:
        message = f"{count:,} {what} exceed the limit of {limit:,}; send fewer, or start with a larger {option}"
        raise _InvalidRequest([{"where": "items", "message": message}])


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
    app.router.route_class = type("Route", (_StrictRoute,), {"limits": limits})

    def require_room(request: ScoreRequest) -> None:
        """Responses in flight are limited too: short ones take far more memory than the bytes of their body."""
        count, in_flight = sum(len(item.responses) for item in request.items), service.responses_in_flight
        if in_flight and in_flight + count > LARGEST_AT_ONCE * limits.max_responses:
            raise HTTPException(429, f"{in_flight:,} responses are in flight; retry later", {"Retry-After": "1"})

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
        require_room(body)
        groups = await _groups(body, count_tokens, small=request.scope[IS_SMALL])
        items: list[list[bytes]] = [[]] * len(groups)
        try:
            async with aclosing(service.score(groups, _wait_for_disconnect(request))) as scored:
                async for i, outcome in scored:
                    items[i] = await _item_json(groups[i], outcome, i, body.items[i].id, details=body.details)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        parts = [part for i, item in enumerate(items) for part in ((b"," if i else b'{"items":['), *item)]
        return _InParts([*(parts or [b'{"items":[']), b"]}"], media_type="application/json")

    @app.post("/score/stream", response_class=JsonLines, responses=_error_responses())
    async def score_stream(body: ScoreRequest, request: Request) -> Response:
        """The same as JSON lines: one ScoredItem per line as soon as it is scored, identified by `index`."""
        require_room(body)
        groups = await _groups(body, count_tokens, small=request.scope[IS_SMALL])

        async def lines() -> AsyncIterator[bytes]:
            try:
                async with aclosing(service.score(groups, _wait_for_disconnect(request))) as scored:
                    async for i, outcome in scored:
                        item = await _item_json(groups[i], outcome, i, body.items[i].id, details=body.details)
                        for part in _sendable([*item, b"\n"]):
                            yield part
            except ClientDisconnected:
                return

        return StreamingResponse(lines(), media_type=JsonLines.media_type)

    _add_error_handlers(app)
    openapi = _openapi(app, limits, token is not None)
    app.openapi = lambda: openapi
    return AdmissionControl(app, service, limits, token, [*openapi["paths"], *PUBLIC_PATHS])


async def _groups(request: ScoreRequest, count: Callable[[str], int] | None, *, small: bool) -> list[Group]:
    def make_groups() -> list[Group]:
        return [with_token_counts(_group(item, i), count) for i, item in enumerate(request.items)]

    if count is not None:
        return await asyncio.to_thread(make_groups)  # tokenizers leave the interpreter to others
    return make_groups() if small else await turns().in_thread(make_groups)


def _group(item: Item, index: int) -> Group:
    where = f"items.{index}"
    try:
        return parse_group(item.row(), str(index), where)
    except DataError as problem:
        raise _InvalidRequest([{"where": where, "message": str(problem).removeprefix(f"{where}: ")}]) from None


async def _item_json(group: Group, outcome: ScoredGroup | Failure, index: int, id: str | None, *, details: bool) -> list[bytes]:
    """A ScoredItem in parts, written in turns."""
    turn, count, step = turns(), len(group.samples), 1 if details else WRITTEN_AT_ONCE
    # With details, each of a response's rewards repeats its text.
    long = details and any(len(sample.text) > LONG_TEXT for sample in group.samples)

    def write(part: range) -> list[bytes]:
        responses = scored_responses(outcome, part, details=details)
        return dump_by_value(responses[0]) if long else [dump(responses)[1:-1]]

    written = [b'{"index":%d,"id":%b,"responses":[' % (index, dump(id))]
    for start in range(0, count, step):
        if turn.over:
            await turn.take()
        part = range(start, min(start + step, count))
        written += ([b","] if start else []) + (await turn.in_thread(write, part) if long else write(part))
    return [*written, b"]}"]


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
        causes = {404: "no_such_path", 405: "no_such_method", 429: "busy"}
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
