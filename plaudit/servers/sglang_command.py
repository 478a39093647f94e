"""The command that starts SGLang."""

from plaudit.servers.server_command import ServerCommand

SGLANG = ServerCommand(title="SGLang", package="sglang", module="sglang.launch_server", program="python")
