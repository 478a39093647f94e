"""`plaudit view`: the verb."""

from pathlib import Path
from typing import Annotated

import typer


def view(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS", help="Run folders, or dumps of rollouts of verl or TRL.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML file instead of serving.", show_default=False)
    ] = None,
    max_mb: Annotated[
        float, typer.Option(min=0.1, help="Size of the file of --out; steps and samples are left out beyond it.")
    ] = 5.0,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8322,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that the page asks for.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Show the runs to other machines without a token.")] = False,
) -> None:
    """Look into runs in a browser: every step, group, sample, component and failure, offline, while it trains.

    Follows a run that is still training. Nothing is written to the run. See docs/view.md.
    """
    from plaudit.report.pages import require_folder
    from plaudit.viewing.sources import open_source
    from plaudit.viewing.viewer import Viewer

    if out is not None:
        require_folder("--out", out)
    viewer = Viewer([open_source(path) for path in paths])
    if out is not None:
        from plaudit.viewing.export import write_page

        print(write_page(viewer, out, max_bytes=int(max_mb * 1e6)))
        return
    from plaudit.serving.cli import read_token, require_token, serving_packages

    token = read_token(token_env)
    with serving_packages(
        "plaudit view needs packages that are not installed; install them with: {}. "
        "With --out FILE.html it writes a file and needs none."
    ):
        from plaudit.viewing.server import serve
    require_token(host, token, "read the runs", insecure=insecure)
    serve(viewer, host, port, token)
