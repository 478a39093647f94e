"""The API: what can be asked at which path, and its description (`/docs`, `/openapi.json`)."""

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
from plaudit.serving.door import GONE, OPEN, Door, Limits, error
from plaudit.serving.metrics import CONTENT_TYPE
from plaudit.serving.service import Gone, Service, answer_of
from plaudit.serving.wire import Error, Health, Item, Problem, Rewards, ScoreAnswer, ScoreRequest, dump, parse
from plaudit.types import Group

ABOUT = """A recipe's rewards. `POST /score` answers when all items are scored, `POST /score/stream` line by line as they are.

Whatever becomes of a response, it has an answer: a reward with its parts, or a failure with its cause, never a hidden zero."""
MOST_TOLD = 20
"""Problems of one request that are told."""
REFERENCE = "#/components/schemas/{model}"
ON_THE_LOOP_BYTES = 64 * 1024
"""Bodies up to this size are read where requests are served; larger ones elsewhere, so that nobody waits for it."""
REFUSALS = {
    401: "The token is not there, or not the right one.",
    408: "The body did not arrive in time.",
    413: "The body is larger than --max-body-bytes.",
    422: "The request cannot be read; `problems` says where.",
    429: "--max-in-flight requests are under way.",
    500: "A fault of the service's own.",
    503: "The service is starting or stopping.",
}


class Lines(Response):
    media_type = "application/x-ndjson"


class Metrics(Response):
    media_type = "text/plain"


class _Strict(Request):
    """A request whose JSON is JSON: no NaN, no numbers too large to be one, nothing nested without end."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return parse(body) if len(body) <= ON_THE_LOOP_BYTES else await asyncio.to_thread(parse, body)
        except ValueError as problem:
            raise _Refused([{"where": "body", "message": f"is not JSON that can be read: {problem}"}]) from None


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_Strict(request.scope, request.receive))

        return handle_strictly


class _Refused(HTTPException):
    """422, with what is wrong where."""

    def __init__(self, problems: Sequence[dict[str, str]]):
        super().__init__(422)
        self.problems = problems


def make_app(
    service: Service, limits: Limits, *, token: str | None = None, count_tokens: Callable[[str], int] | None = None
) -> ASGIApp:
    """`count_tokens`: for responses that come without their number of tokens."""
    app = FastAPI(title="plaudit serve", version=__version__, description=ABOUT, redoc_url=None)
    app.router.route_class = _StrictRoute

    @app.get("/health", responses={503: {"model": Health, "description": "Starting or stopping."}}, response_model=Health)
    async def health() -> Response:
        """Whether it takes requests. Needs no token."""
        body = {"state": service.state, "version": __version__}
        return Response(dump(body), 200 if service.state == "ready" else 503, media_type="application/json")

    @app.get("/rewards", response_model=Rewards)
    async def rewards() -> Response:
        """Which rewards are asked, and how the recipe sets them."""
        return Response(dump({"rewards": service.about()}), media_type="application/json")

    @app.get("/metrics", response_class=Metrics)
    async def metrics() -> Response:
        """What was done so far, in Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(service.state), headers={"Content-Type": CONTENT_TYPE})

    @app.post("/score", response_model=ScoreAnswer, responses=_refusals())
    async def score(asked: ScoreRequest, request: Request) -> Response:
        """Scores of all items, in their order, when the last one is there."""
        groups = await _groups(asked, limits.max_items, count_tokens)
        answers: list[Any] = [None] * len(groups)
        try:
            async with aclosing(service.score(groups, _gone(request))) as scored:
                async for i, outcome in scored:
                    answers[i] = answer_of(groups[i], outcome, i, asked.items[i].id, details=asked.details)
        except Gone:
            return Response(status_code=GONE)
        return Response(dump({"items": answers}), media_type="application/json")

    @app.post("/score/stream", response_class=Lines, responses=_refusals())
    async def score_as_they_come(asked: ScoreRequest, request: Request) -> Response:
        """The same, a line of JSON for each item as soon as it is scored: a ScoredItem, whose `index` says which."""
        groups = await _groups(asked, limits.max_items, count_tokens)

        async def lines() -> AsyncIterator[bytes]:
            try:
                async with aclosing(service.score(groups, _gone(request))) as scored:
                    async for i, outcome in scored:
                        yield dump(answer_of(groups[i], outcome, i, asked.items[i].id, details=asked.details)) + b"\n"
            except Gone:
                return

        return StreamingResponse(lines(), media_type=Lines.media_type)

    _tell_errors(app)
    description = _description(app, limits, token is not None)
    app.openapi = lambda: description
    return Door(app, service, limits, token, [*description["paths"], *OPEN])


async def _groups(asked: ScoreRequest, most: int, count: Callable[[str], int] | None) -> list[Group]:
    if len(asked.items) > most:
        message = (
            f"a request may have {most:,} items, this one has {len(asked.items):,}; send fewer, or start with a larger --max-items"
        )
        raise _Refused([{"where": "items", "message": message}])

    def made() -> list[Group]:
        return [with_token_counts(_group(item, i), count) for i, item in enumerate(asked.items)]

    return made() if count is None else await asyncio.to_thread(made)


def _group(item: Item, index: int) -> Group:
    where = f"items.{index}"
    try:
        return parse_group(item.row(), str(index), where)
    except DataError as problem:
        raise _Refused([{"where": where, "message": str(problem).removeprefix(f"{where}: ")}]) from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# What is wrong -------------------------------------------------------------------------------------------------------


def _tell_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, found: RequestValidationError) -> Response:
        problems = [_problem(one) for one in found.errors()]
        if not request.headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json"):
            problems = [{"where": "body", "message": "should be sent as Content-Type: application/json"}]
        return _unreadable(problems)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, found: StarletteHTTPException) -> Response:
        if isinstance(found, _Refused):
            return _unreadable(found.problems)
        causes = {404: "no_such_path", 405: "no_such_method"}
        message = f"{request.method} {request.url.path}: {found.detail}"
        return error(found.status_code, causes.get(found.status_code, "refused"), message, headers=found.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, found: Exception) -> Response:
        told = redact(last_line(found))
        print_line(f"serve: {request.method} {request.url.path}: {told}", "red")
        return error(500, "exception", told)


def _unreadable(problems: Sequence[dict[str, str]]) -> Response:
    first, more = problems[0], len(problems) - 1
    message = f"{first['where']}: {first['message']}" + (f" (and {more} more)" if more else "")
    return error(422, "unreadable", message, problems[:MOST_TOLD])


def _problem(found: Any) -> dict[str, str]:
    """pydantic's, in our words: where (less the names of alternatives), and what should be there."""
    *outer, last = [str(part) for part in found["loc"][1:] if not str(part).startswith("<")] or ["body"]
    where = ".".join([*outer, last])
    if found["type"] == "extra_forbidden":
        known = Item.model_fields if "items" in outer else ScoreRequest.model_fields
        return {"where": where, "message": f"is not a field.{did_you_mean(last, known)}"}
    if found["type"] == "missing":
        return {"where": where, "message": "is missing"}
    return {"where": where, "message": _lowered(found["msg"].removeprefix("Input "))}


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


# The description -----------------------------------------------------------------------------------------------------


def _description(app: FastAPI, limits: Limits, secured: bool) -> dict[str, Any]:
    """OpenAPI, with what only this server knows: how many items, and whether it wants a token."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found["components"]["schemas"]
    schemas |= {model.__name__: model.model_json_schema(ref_template=REFERENCE) for model in (Problem, Error)}
    schemas["Error"].pop("$defs")
    schemas["ScoreRequest"]["properties"]["items"]["maxItems"] = limits.max_items
    if secured:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operation in _operations(found):
            if path not in OPEN:
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _refusal(401)
    return found


def _refusals() -> dict[int | str, dict[str, Any]]:
    return {status: _refusal(status) for status in REFUSALS if status != 401}


def _refusal(status: int) -> dict[str, Any]:
    """Not as FastAPI has it: a stream's errors are no streams."""
    schema = {"$ref": REFERENCE.format(model="Error")}
    return {"description": REFUSALS[status], "content": {"application/json": {"schema": schema}}}


def _operations(description: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    return [(path, operation) for path, methods in description["paths"].items() for operation in methods.values()]
