"""vLLM as the engine: how its server is started, called, given weights and put to sleep.

Weights are taken by methods that plaudit adds to vLLM's worker (`worker/plaudit_vllm.py`). vLLM's environment need not have
plaudit, only that folder on its path.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.rollout.engine import Capabilities, Sampling, Weights
from plaudit.rollout.served.dialect import BadAnswer, Dialect, Launch, Server, ServerLost, require_logprobs
from plaudit.rollout.served.weight_files import weight_files
from plaudit.rollout.served.worker.plaudit_weight_stream import TOKEN_BYTES, Named, Sums, WeightSender, add_sums
from plaudit.servers.process import HOST
from plaudit.servers.vllm_command import VLLM

WORKER_FOLDER = Path(__file__).with_name("worker")
EXTENSION, GATE = "plaudit_vllm.PolicyWeights", "plaudit_vllm.VersionGate"
VERSION_HEADER, TOKEN = "x-plaudit-version", "PLAUDIT_SERVER_TOKEN"
VERSION_PATH = "/plaudit/version"
SERVED_NAME = "policy"
BUCKET_BYTES = 256 << 20
"""Weights sent together: enough to make the round trip cheap, few enough not to take memory that is needed."""
SUMS_AGREE = 1e-5
"""Largest relative difference of sums of weights: they are added in another order."""


class Vllm(Dialect):
    name = "vllm"
    command = VLLM
    capabilities = Capabilities(keyed_noise=False, truncated_logprobs=False)
    sample_path = "/v1/completions"

    # Start -------------------------------------------------------------------------------------------------------------

    def arguments(self, launch: Launch, port: int, token: str) -> list[str]:
        """Weights are random until the first sync: a server that was not given any must not look as if it had them."""
        words = [
            *("--model", str(launch.folder), "--served-model-name", SERVED_NAME, "--host", HOST, "--port", str(port)),
            *("--load-format", "dummy", "--dtype", launch.dtype, "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", EXTENSION, "--middleware", GATE, "--no-enable-log-requests"),
        ]
        if launch.sleeps:
            words.append("--enable-sleep-mode")
        if launch.on_gpu:
            words += ["--gpu-memory-utilization", f"{self.settings.memory_share:.3f}"]
        if self.settings.tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(self.settings.tensor_parallel)]
        return words

    def environment(self, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
        path = ":".join(filter(None, (str(WORKER_FOLDER), inherited.get("PYTHONPATH"))))
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path, TOKEN: token}

    # Samples -----------------------------------------------------------------------------------------------------------

    def request(
        self, tokens: np.ndarray, sampling: Sampling, max_new_tokens: int, seed: int, end_tokens: Sequence[int]
    ) -> dict[str, Any]:
        """End tokens are ours, so vLLM's own are ignored."""
        asked: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": tokens.tolist(),
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "seed": seed % 2**63,
            "ignore_eos": True,
            "stop_token_ids": list(end_tokens),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        if sampling.temperature > 0:
            asked |= {"top_p": sampling.top_p, "top_k": sampling.top_k or 0, "min_p": sampling.min_p}
        if sampling.stop:
            asked |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        return asked

    def request_headers(self, version: int) -> dict[str, str]:
        """The server refuses a request for another version than it has."""
        return {VERSION_HEADER: str(version)}

    def read(self, answer: Any, version: int) -> tuple[list[int], list[float]]:
        try:
            [choice] = answer["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"no tokens with log-probs in its answer {str(answer)[:200]}") from error
        require_logprobs(tokens, logprobs)
        return tokens, logprobs

    # Weights -----------------------------------------------------------------------------------------------------------

    def load(self, server: Server, weights: Weights, version: int, *, first: bool) -> None:
        server.call(VERSION_PATH, headers={VERSION_HEADER: ""})
        sums: Sums = {}
        named = _with_sums(weights, sums) if first else iter(weights)
        if self.settings.weights == "files":
            self._send_files(server, named)
        else:
            self._send_stream(server, named)
        if first:
            self._compare_sums(server, sums)
        server.call("/reset_prefix_cache")
        server.call(VERSION_PATH, headers={VERSION_HEADER: str(version)})

    def on_workers(self, server: Server, method: str, *arguments: str) -> list[Any]:
        """The result of each worker of the server."""
        return server.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"]

    def _send_stream(self, server: Server, weights: Iterator[Named]) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        limit = self.settings.call_timeout_s
        sender = WeightSender(token, shared=server.shares_gpu, bucket_bytes=BUCKET_BYTES, timeout_s=limit)
        loading = server.begin("/collective_rpc", {"method": "plaudit_load", "args": [sender.address, token.hex()]})

        def check() -> None:
            server.check()
            if loading.done():
                loading.result()
                raise ServerLost("it ended loading before all weights were sent")

        try:
            count, size = sender.send(weights, self.settings.tensor_parallel, check)
            _require_all(server.wait(loading, "new weights")["results"], count, size)
        except OSError as error:
            with suppress(TimeoutError):
                loading.result(10.0)  # raises the server's own account of what went wrong, which is better
            raise ServerLost(f"while weights were sent: {error}") from error
        finally:
            sender.close()

    def _send_files(self, server: Server, weights: Iterator[Named]) -> None:
        folder = server.folder / "weights"
        with weight_files(folder, weights) as (count, size):
            _require_all(self.on_workers(server, "plaudit_load_files", str(folder)), count, size)

    def _compare_sums(self, server: Server, ours: Mapping[str, Sequence[float]]) -> None:
        """The sums of each layer's weights are the trainer's, so they were loaded where they belong, and completely. Layers that
        the server has packed into another form (as vLLM does on a CPU) cannot be compared."""
        if self.settings.tensor_parallel > 1:
            return  # each worker has a part of some weights and all of others
        [theirs] = self.on_workers(server, "plaudit_sums")
        for name, (count, total, squares) in ours.items():
            got_count, got_total, got_squares = theirs.get(name, (0, 0.0, 0.0))
            if got_count != count:
                continue
            agree = abs(got_squares - squares) <= SUMS_AGREE * squares
            if not agree or abs(got_total - total) > SUMS_AGREE * max(abs(total), squares**0.5):
                raise BadAnswer(
                    f"after the first sync its weights of {name} are not the policy's (Σw² is {got_squares:.6g}, and should be "
                    f"{squares:.6g}): it cannot sample this model correctly"
                )

    # Memory ------------------------------------------------------------------------------------------------------------

    def sleep(self, server: Server) -> None:
        server.call(VERSION_PATH, headers={VERSION_HEADER: ""})
        server.call("/sleep?level=2")

    def wake(self, server: Server, what: str) -> None:
        server.call(f"/wake_up?tags={what}")


def _require_all(loaded: Iterable[Mapping[str, Any]], count: int, size: int) -> None:
    for worker in loaded:
        if worker["tensors"] != count or worker["bytes"] != size:
            raise BadAnswer(f"{worker['tensors']} weights ({worker['bytes']:,} bytes) arrived, of {count} ({size:,})")
        if missing := worker["missing"]:
            raise BadAnswer(
                f"its model has weights that the policy has not: {', '.join(missing[:3])}. It cannot sample this model."
            )


def _with_sums(weights: Iterable[Named], sums: Sums) -> Iterator[Named]:
    for name, tensor in weights:
        add_sums(sums, name, tensor)
        yield name, tensor
