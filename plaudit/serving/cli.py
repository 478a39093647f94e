"""`plaudit serve`: a recipe's rewards as an HTTP service."""

import os
from pathlib import Path
from typing import Annotated

import typer

from plaudit.errors import PlauditError
from plaudit.inputs import load_rewards


def serve(
    recipe: Annotated[
        Path, typer.Argument(metavar="R.yaml", help="A recipe with `rewards:`, or an RL recipe.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.name=value]…", help="Settings that replace the recipe's own.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Where it listens; by default only this machine reaches it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8321,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that holds the token callers must send.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen to other machines without a token.")] = False,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest request.")] = 16 * 2**20,
    max_items: Annotated[int, typer.Option(min=1, help="Most items of a request.")] = 1024,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Most requests under way; others are answered 429.")] = 256,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Longest request; what is not scored by then failed (timeout).")
    ] = 600.0,
    grace_s: Annotated[float, typer.Option(min=0.0, help="How long it finishes what is under way when told to stop.")] = 30.0,
    cache: Annotated[
        Path | None, typer.Option(help="A file to keep scores in that are slow or cost money.", show_default=False)
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A model whose tokenizer counts tokens where requests do not say.")] = None,
) -> None:
    """A recipe's rewards as an HTTP service: scores, metrics, and its own description at /docs.

    SIGTERM or Ctrl-C finishes what is under way and stops; a second one stops at once. docs/serve.md has examples.
    """
    rewards = load_rewards(recipe, overrides)
    token = _token(token_env)
    try:
        from plaudit.serving.door import Limits
        from plaudit.serving.server import ServeJob, is_loopback
        from plaudit.serving.server import serve as run_serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise PlauditError(
            f"plaudit serve needs {error.name}, which is not installed; install it with: pip install 'plaudit[serve]'"
        ) from None

    if not is_loopback(host) and token is None and not insecure:
        raise PlauditError(
            f"--host {host}: whoever reaches this machine could use the rewards, and the models behind them. Give --token-env NAME "
            "(the environment variable with a token), or --insecure if the network is trusted."
        )
    limits = Limits(max_body_bytes, max_items, max_in_flight)
    run_serve(ServeJob(rewards, host, port, limits, timeout_s, grace_s, token, cache, tokenizer))


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name, "")
    if not token:
        raise PlauditError(
            f"--token-env {name}: there is no such environment variable, or it is empty. It should hold the token itself."
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise PlauditError(f"--token-env {name}: a token is of ASCII letters, digits and signs, without spaces")
    return token
