"""vLLM as the engine: how its server is started, called, given weights and put to sleep.

Weights are taken by methods that plaudit adds to vLLM's worker (`worker/plaudit_vllm.py`). vLLM's environment need not have
plaudit, only that folder on its path, and `plaudit/servers/inside`.

With LoRA, the base's weights are sent once, then only the adapter of each step, under a name of its own: a sample can only be drawn
by the adapter that its request names.
"""

import json
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.report.progress import print_own_warning
from plaudit.rollout.engine import Capabilities, Sampling, Weights
from plaudit.rollout.served.dialect import BadAnswer, Dialect, Launch, Server, ServerLost, require_logprobs
from plaudit.rollout.served.weight_files import weight_files
from plaudit.rollout.served.worker.plaudit_weight_stream import TOKEN_BYTES, Named, Sums, WeightSender, add_sums
from plaudit.servers.vllm_command import VLLM, vllm_environment

if TYPE_CHECKING:
    from plaudit.models.lora import Adapters
    from plaudit.recipe.rollout import EngineServerSettings

WORKER_FOLDER = Path(__file__).with_name("worker")
EXTENSION, GATE = "plaudit_vllm.PolicyWeights", "plaudit_vllm.VersionGate"
VERSION_HEADER, CLAIMANT = "x-plaudit-version", "x-plaudit-claimant"
STATE_PATH, CLAIM_PATH = "/plaudit/state", "/plaudit/claim"
SERVED_NAME = "policy"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, as vLLM reserves memory for them."""
COMPUTED = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
CLAIM_POLL_S = 0.2
CLAIM_S = 60.0
"""How long a process that was killed while it loaded weights keeps others waiting. One that is at work claims it again."""
BUCKET_BYTES = 256 << 20
"""Weights sent together: enough to make the round trip cheap, few enough not to take memory that is needed."""
SUMS_AGREE = 1e-5
"""Largest relative difference of sums of weights: they are added in another order."""


class Vllm(Dialect):
    name = "vllm"
    command = VLLM
    capabilities = Capabilities(keyed_noise=False, truncated_logprobs=False)
    sample_path = "/v1/completions"
    metrics_path = "/metrics"
    takes_adapters = True
    own_calls = ((STATE_PATH, None), ("/collective_rpc", {"method": "plaudit_memory"}))

    def __init__(self, settings: "EngineServerSettings"):
        super().__init__(settings)
        self._merges = settings.lora == "merged"
        self._model_name = SERVED_NAME
        """What requests name: the policy, or the adapter of this version."""
        self._claimant = secrets.token_hex(8)

    # Start -------------------------------------------------------------------------------------------------------------

    def arguments(self, launch: Launch, port: int, token: str) -> list[str]:
        """Weights are random until the first sync: a server that was not given any must not look as if it had them."""
        words = [
            *("--model", str(launch.folder), "--served-model-name", SERVED_NAME, "--host", launch.host, "--port", str(port)),
            *("--load-format", "dummy", "--dtype", launch.dtype, "--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm"),  # the model's own may have penalties, and a limit of new tokens
            *("--worker-extension-cls", EXTENSION, "--middleware", GATE, "--no-enable-log-requests"),
        ]
        if launch.sleeps:
            words.append("--enable-sleep-mode")
        if launch.on_gpu:
            words += ["--gpu-memory-utilization", f"{self.settings.resolved_memory_share:.3f}"]
        else:
            words.append("--no-enable-chunked-prefill")  # on a CPU, chunks of prompts with a seed end in an error (vLLM 0.32)
        if self.settings.tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(self.settings.tensor_parallel)]
        if launch.lora_rank is not None and not self._merges:
            words += ["--enable-lora", "--max-lora-rank", str(_reserved_rank(launch.lora_rank)), "--max-loras", "1"]
        return words

    def environment(self, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
        own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        return {**vllm_environment(token, inherited, WORKER_FOLDER), **own}

    # Samples -----------------------------------------------------------------------------------------------------------

    def request(
        self, tokens: np.ndarray, sampling: Sampling, max_new_tokens: int, seed: int, end_tokens: Sequence[int]
    ) -> dict[str, Any]:
        """End tokens are ours, so vLLM's own are ignored."""
        asked: dict[str, Any] = {
            "model": self._model_name,
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
        return {VERSION_HEADER: self.label(version)}

    def tokens_computed(self, metrics: str) -> float:
        return sum(float(line.rsplit(None, 1)[1]) for line in metrics.splitlines() if line.startswith(COMPUTED))

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
        label = self.label(version)
        state = self._claim(server, label)
        if state["claim"] == "wait" and weights.gathered:
            for _ in weights:  # the process that loads them needs this one to gather them
                pass
        deadline = time.monotonic() + 2 * self.settings.call_timeout_s
        while state["claim"] == "wait":
            if time.monotonic() > deadline:
                raise ServerLost("other processes have been loading weights for twice rollout.server.call_timeout_s")
            server.check()
            time.sleep(CLAIM_POLL_S)
            state = self._claim(server, label)
            if state["claim"] == "yours" and weights.gathered:
                self._claim(server, label, seconds=0.0)
                raise ServerLost("another process was to load its weights, and did not")
        if state["claim"] == "has":  # another process was first
            self._model_name = state["adapter"] or SERVED_NAME
            return
        try:
            with self._renewed_claim(server, label):
                loaded = self._load_claimed(server, weights, label, state, first=first)
        except BaseException:
            with suppress(ServerLost, TrainingStopped):
                self._claim(server, label, seconds=0.0)  # the others need not wait
            raise
        self._model_name = loaded["adapter"] or SERVED_NAME
        server.call(STATE_PATH, headers={VERSION_HEADER: label, CLAIMANT: self._claimant, **_state_headers(loaded)})

    def _claim(self, server: Server, label: str, seconds: float | None = None) -> Mapping[str, Any]:
        """Ask to load these weights; until they are loaded, the server samples nothing. Returns its answer and its state."""
        limit = CLAIM_S if seconds is None else seconds
        headers = {VERSION_HEADER: label, CLAIMANT: self._claimant, "x-plaudit-claim-s": str(limit)}
        return server.call(CLAIM_PATH, headers=headers)

    @contextmanager
    def _renewed_claim(self, server: Server, label: str) -> Iterator[None]:
        """While weights are loaded, however long that takes."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(CLAIM_S / 4):
                with suppress(ServerLost, TrainingStopped):  # the loading itself will notice
                    self._claim(server, label)

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _load_claimed(
        self, server: Server, weights: Weights, label: str, state: Mapping[str, Any], *, first: bool
    ) -> dict[str, str]:
        """What the server then has besides this version."""
        loaded = {"base": "", "adapter": ""}
        # All processes that gather weights must gather the same, whatever their servers have.
        adapters = None if self._merges or weights.gathered else weights.adapters
        if adapters is not None:
            base = self.run_key or "base"
            if state["base"] != base:
                self._send(server, weights.base, compare=first)
            if state["adapter"]:
                server.refusal("/v1/unload_lora_adapter", {"lora_name": state["adapter"]})
            name = f"{SERVED_NAME}-{label}"
            if self._send_adapter(server, adapters, name):
                loaded = {"base": base, "adapter": name}
        if not loaded["adapter"]:
            self._send(server, iter(weights), compare=first)
        server.call("/reset_prefix_cache")
        return loaded

    def on_workers(self, server: Server, method: str, *arguments: str) -> list[Any]:
        """The result of each worker of the server."""
        return server.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"]

    def _send(self, server: Server, weights: Iterator[Named], *, compare: bool) -> None:
        sums: Sums = {}
        named = _with_sums(weights, sums) if compare else weights
        if self.settings.weights == "files":
            self._send_files(server, named)
        else:
            results, count, size = self._stream(server, named, "plaudit_load", shared=server.shares_gpu)
            _require_all(results, count, size)
        if compare:
            self._compare_sums(server, sums)

    def _stream(
        self, server: Server, weights: Iterable[Named], method: str, *arguments: str, shared: bool
    ) -> tuple[list[Any], int, int]:
        """What each worker returns, and the numbers of tensors and bytes that were sent to it."""
        token, limit = secrets.token_bytes(TOKEN_BYTES), self.settings.call_timeout_s
        workers = len(self.on_workers(server, "plaudit_memory")) if self.settings.url else self.settings.tensor_parallel
        sender = WeightSender(token, shared=shared, bucket_bytes=BUCKET_BYTES, timeout_s=limit, host=server.listen_on)
        loading = server.begin("/collective_rpc", {"method": method, "args": [sender.address, token.hex(), *arguments]})

        def check() -> None:
            server.check()
            if loading.done():
                loading.result()
                raise ServerLost("it ended loading before all weights were sent")

        try:
            count, size = sender.send(weights, workers, check)
            return server.wait(loading, "new weights")["results"], count, size
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

    def _send_adapter(self, server: Server, adapters: "Adapters", name: str) -> bool:
        """Whether the server can use it. If not, and rollout.server.lora leaves it open, merged weights are sent from now on."""
        where = "" if self.settings.url else str(server.folder)
        folder, *_ = self._stream(server, adapters, "plaudit_take_adapter", json.dumps(adapters.config), where, shared=False)[0]
        problem = server.refusal("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        if problem is None:
            return True
        if self.settings.lora == "adapters":
            raise BadAnswer(f"it cannot use the policy's LoRA adapters: {problem}. Set rollout.server.lora=merged")
        print_own_warning(f"the vLLM server cannot use LoRA adapters ({problem}): it is given all weights, merged, in every step")
        self._merges = True
        return False

    def _compare_sums(self, server: Server, ours: Mapping[str, Sequence[float]]) -> None:
        """The sums of each layer's weights are the trainer's, so they were loaded where they belong, and completely. Layers that
        the server has packed into another form (as vLLM does on a CPU) cannot be compared."""
        theirs, *others = self.on_workers(server, "plaudit_sums")
        if others:
            return  # each worker has a part of some weights and all of others
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
        """The base of adapters, which is not sent again, stays in host memory."""
        adapted = self._model_name != SERVED_NAME
        forgets = {} if adapted else {"base": "", "adapter": ""}
        server.call(STATE_PATH, headers={VERSION_HEADER: "", **_state_headers(forgets)})
        server.call(f"/sleep?level={1 if adapted else 2}")

    def wake(self, server: Server, what: str) -> None:
        server.call(f"/wake_up?tags={what}")


def _reserved_rank(rank: int) -> int:
    """The smallest that vLLM can reserve memory for."""
    if rank > LORA_RANKS[-1]:
        raise RecipeError(
            f"model.lora.rank is {rank}, and vLLM's adapters have at most {LORA_RANKS[-1]}: set rollout.server.lora=merged"
        )
    return next(reserved for reserved in LORA_RANKS if reserved >= rank)


def _state_headers(state: Mapping[str, str]) -> dict[str, str]:
    return {f"x-plaudit-{name}": value for name, value in state.items()}


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
