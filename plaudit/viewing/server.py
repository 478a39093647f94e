"""The server behind `plaudit view`: listens until Ctrl-C."""

import threading

import uvicorn

from plaudit.serving.listening import address_of, is_loopback, listening
from plaudit.viewing.app import make_app
from plaudit.viewing.viewer import Viewer

__all__ = ["is_loopback", "serve"]


def serve(viewer: Viewer, host: str, port: int, token: str | None) -> None:
    app = make_app(viewer, token=token, local_only=is_loopback(host))
    with listening(host, port) as listener:
        config = uvicorn.Config(app, lifespan="off", log_level="error", access_log=False, server_header=False, ws="none")
        print(f"{', '.join(viewer.names)}: {address_of(listener)}  (Ctrl-C to stop)", flush=True)
        threading.Thread(target=viewer.read_ahead, daemon=True).start()  # while the browser opens
        uvicorn.Server(config).run(sockets=[listener])
