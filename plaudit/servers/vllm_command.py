"""The command that starts vLLM."""

from plaudit.servers.server_command import ServerCommand

VLLM = ServerCommand(title="vLLM", package="vllm", module="vllm.entrypoints.openai.api_server", program="vllm")
vllm_command, find_launch_problem = VLLM.words, VLLM.find_problem
