"""The command that starts SGLang, and how a server gets a key that nobody else can read."""

import json
import os
from pathlib import Path

from plaudit.servers.server_command import ServerCommand

NO_WORK_FOR_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""`/health`, which needs no key, would generate a token, and so wake a server that sleeps."""
SGLANG = ServerCommand(title="SGLang", package="sglang", module="sglang.launch_server", program="python")


def key_arguments(file: Path, key: str) -> list[str]:
    """Arguments with which the server takes this key, for all routes but /health, from a file that is written here: command lines
    are visible to everybody on a machine."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"api-key: {json.dumps(key)}\n")  # YAML: a string, whatever it looks like
    return ["--config", str(file)]
