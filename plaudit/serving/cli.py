"""`plaudit serve`: a recipe's rewards as an HTTP service."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from plaudit.errors import PlauditError, install_extra
from plaudit.inputs import load_rewards
from plaudit.options import RewardRecipe, Tokenizer
from plaudit.serving.listening import is_loopback


def serve(
    recipe: RewardRecipe,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="section.name=value", help="Settings that override the recipe's.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8321,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept requests from other machines without a token.")] = False,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request body.")] = 16 * 2**20,
    max_items: Annotated[int, typer.Option(min=1, help="Maximum number of items per request.")] = 1024,
    max_responses: Annotated[int, typer.Option(min=1, help="Maximum number of responses per request.")] = 16_384,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests; others get status 429.")] = 256,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Time limit per request; items not scored by then fail (timeout).")
    ] = 600.0,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of connections; one more closes the one that has waited longest for its client."),
    ] = 1000,
    header_timeout_s: Annotated[float, typer.Option(min=0.001, help="Time limit for receiving a header.")] = 10.0,
    body_timeout_s: Annotated[float, typer.Option(min=0.001, help="Time limit for receiving a body.")] = 60.0,
    send_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="A client that reads less than 64 KiB of its response in this time is disconnected.")
    ] = 60.0,
    keep_alive_s: Annotated[float, typer.Option(min=0.001, help="Time a connection stays open between requests.")] = 5.0,
    grace_s: Annotated[float, typer.Option(min=0.0, help="Time to finish requests in flight on shutdown.")] = 30.0,
    cache: Annotated[Path | None, typer.Option(help="File to cache slow or costly scores in.", show_default=False)] = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Serve a recipe's rewards over HTTP: scores, metrics, and API documentation at /docs.

    SIGTERM or Ctrl-C finishes requests in flight and stops; a second one stops at once. See docs/serve.md for examples.
    """
    rewards = load_rewards(recipe, overrides)
    token = read_token(token_env)
    with serving_packages("plaudit serve needs packages that are not installed; install them with: {}"):
        from plaudit.serving.admission import Limits
        from plaudit.serving.connections import ConnectionLimits
        from plaudit.serving.server import ServeJob
        from plaudit.serving.server import serve as run_serve
    require_token(host, token, "use the rewards and their models", insecure=insecure)
    limits = Limits(max_body_bytes, max_items, max_responses, max_in_flight, body_timeout_s)
    connections = ConnectionLimits(max_connections, header_timeout_s, keep_alive_s, send_timeout_s)
    run_serve(ServeJob(rewards, host, port, limits, connections, timeout_s, grace_s, token, cache, tokenizer))


@contextmanager
def serving_packages(missing: str) -> Iterator[None]:
    """Imports that need the extra `serve`. `missing`: the error without it, with {} for the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise PlauditError(missing.format(install_extra("serve"))) from None


def require_token(host: str, token: str | None, risk: str, *, insecure: bool) -> None:
    """Only this machine may be served without one, unless the user insists."""
    if not is_loopback(host) and token is None and not insecure:
        raise PlauditError(
            f"--host {host}: anyone who can reach this machine could {risk}. Pass --token-env NAME (an environment variable with "
            "a token), or --insecure if the network is trusted."
        )


def read_token(name: str | None) -> str | None:
    """The token in an environment variable, if one is named."""
    if name is None:
        return None
    token = os.environ.get(name, "")
    if not token:
        raise PlauditError(f"--token-env {name}: this environment variable is unset or empty. It should contain the token itself.")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise PlauditError(f"--token-env {name}: the token must be printable ASCII without spaces")
    return token
