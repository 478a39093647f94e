"""vLLM as the engine: how its server is started, asked, given weights and put to sleep.

Weights are taken by methods that plaudit adds to vLLM's worker (`worker/plaudit_vllm.py`). vLLM's environment need not have
plaudit, only that folder on its path.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.rollout.engine import Sampling
from plaudit.servers.process import HOST

WORKER_FOLDER = Path(__file__).with_name("worker")
EXTENSION, GATE = "plaudit_vllm.PolicyWeights", "plaudit_vllm.VersionGate"
VERSION_HEADER, TOKEN = "x-plaudit-version", "PLAUDIT_SERVER_TOKEN"
SERVED_NAME = "policy"
SAMPLE_PATH = "/v1/completions"


def arguments(folder: Path, port: int, dtype: str, *, sleeps: bool, memory_share: float | None, tensor_parallel: int) -> list[str]:
    """What follows the command that starts vLLM. Weights are random until the first sync: a server that was not given any must not
    look as if it had them."""
    words = [
        *("--model", str(folder), "--served-model-name", SERVED_NAME, "--host", HOST, "--port", str(port)),
        *("--load-format", "dummy", "--dtype", dtype, "--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", EXTENSION, "--middleware", GATE, "--no-enable-log-requests"),
    ]
    if sleeps:
        words.append("--enable-sleep-mode")
    if memory_share is not None:
        words += ["--gpu-memory-utilization", f"{memory_share:.3f}"]
    if tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(tensor_parallel)]
    return words


def environment(token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    path = ":".join(filter(None, (str(WORKER_FOLDER), inherited.get("PYTHONPATH"))))
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path, TOKEN: token}


def request(tokens: np.ndarray, sampling: Sampling, max_new_tokens: int, seed: int, end_tokens: Sequence[int]) -> dict[str, Any]:
    """One sample of a prompt. End tokens are ours, so vLLM's own are ignored."""
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


def tokens_and_logprobs(answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The sampled tokens, with the end token, and the log-prob of each. Raises ValueError if the answer has no such."""
    try:
        [choice] = answer["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no tokens with log-probs in its answer {str(answer)[:200]}") from error
    if not tokens or len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in logprobs):
        raise ValueError("a log-prob that is no finite number")
    return tokens, logprobs
