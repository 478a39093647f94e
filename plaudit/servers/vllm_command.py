"""The command that starts vLLM, and the environment of a server that only we may control."""

from collections.abc import Mapping
from pathlib import Path

from plaudit.servers.server_command import INSIDE, KEY, ServerCommand

VLLM = ServerCommand(title="vLLM", package="vllm", module="vllm.entrypoints.openai.api_server", program="vllm")
KEY_GATE = "plaudit_gate.KeyGate"
"""`--middleware`: without it, vLLM's key leaves the routes open that put it to sleep."""


def vllm_environment(key: str, inherited: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """With routes that control the server (sleep, weights). `folders`: further ones that it imports from. vLLM's own key becomes
    this one: it would refuse ours if the user had set another."""
    path = ":".join(filter(None, (*map(str, (*folders, INSIDE)), inherited.get("PYTHONPATH"))))
    return {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, KEY: key, "VLLM_API_KEY": key}
