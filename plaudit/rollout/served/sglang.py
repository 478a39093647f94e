"""SGLang as the engine, through its documented HTTP routes: nothing of ours runs in its process.

    /generate                      a sample: tokens, their log-probs, and the label of the weights that drew them (`weight_version`)
    /update_weights_from_disk      new weights, with the label that answers carry from then on
    /release_memory_occupation     sleep; /resume_memory_occupation wakes

Log-probs are those of the tempered distribution, unless (SGLANG_)RETURN_ORIGINAL_LOGPROB is set. They are taken before top-p, top-k
and min-p in version 0.5.23, but in versions up to 0.5.6 with min-p on a GPU after them, so they count as truncated.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.errors import RecipeError
from plaudit.rollout.engine import Capabilities, Sampling, Weights
from plaudit.rollout.served.dialect import BadAnswer, Dialect, Launch, Server, ServerLost, require_logprobs
from plaudit.rollout.served.weight_files import weight_files
from plaudit.rollout.stopping import end_tokens_of
from plaudit.servers.process import HOST
from plaudit.servers.sglang_command import NO_WORK_FOR_HEALTH, SGLANG, key_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from plaudit.recipe.rollout import EngineServerSettings

CONTEXT_MARGIN = 8
"""SGLang ends a sequence a few tokens before its context is full."""
NOT_FINITE = "NaN happened"
"""What SGLang gives as the reason for ending a response that it cannot sample any further."""


class Sglang(Dialect):
    name = "sglang"
    command = SGLANG
    capabilities = Capabilities(keyed_noise=False, truncated_logprobs=False)
    sample_path = "/generate"

    def __init__(self, settings: "EngineServerSettings"):
        super().__init__(settings)
        if settings.weights == "stream":
            raise RecipeError("rollout.server.weights: SGLang takes them as files; set it to auto or files")
        self._label: str | None = None
        """The `weight_version` of the weights that samples must be by. A server that was just started has SGLang's default."""
        self._pushes = 0

    # Start -------------------------------------------------------------------------------------------------------------

    def save_model(self, folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        """SGLang also ends a response at the end tokens of these files, so they have none but the policy's."""
        ends = sorted(end_tokens_of(model))
        config, generation = deepcopy(model.config), deepcopy(model.generation_config)
        config.eos_token_id = generation.eos_token_id = ends or None  # pyright: ignore
        config.save_pretrained(folder)
        generation.save_pretrained(folder)  # pyright: ignore
        if ends and tokenizer.eos_token_id not in ends:
            tokenizer = deepcopy(tokenizer)
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
        tokenizer.save_pretrained(folder)

    def arguments(self, launch: Launch, port: int, token: str) -> list[str]:
        """Weights are random until the first sync."""
        words = [
            *("--model-path", str(launch.folder), "--host", HOST, "--port", str(port)),
            *key_arguments(launch.folder / "server.yaml", token),
            *("--load-format", "dummy", "--dtype", launch.dtype),
        ]
        if launch.context is not None:
            words += ["--context-length", str(launch.context + CONTEXT_MARGIN)]
        if launch.on_gpu:
            words += ["--mem-fraction-static", f"{self.settings.resolved_memory_share:.3f}"]
        else:
            words += ["--device", "cpu"]
        if launch.sleeps:
            words.append("--enable-memory-saver")
        if self.settings.tensor_parallel > 1:
            words += ["--tp-size", str(self.settings.tensor_parallel)]
        return words

    def environment(self, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
        untempered = dict.fromkeys(("SGLANG_RETURN_ORIGINAL_LOGPROB", "RETURN_ORIGINAL_LOGPROB"), "0")  # its name before 0.5.4
        return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", **NO_WORK_FOR_HEALTH, **untempered}

    # Samples -----------------------------------------------------------------------------------------------------------

    def request(
        self, tokens: np.ndarray, sampling: Sampling, max_new_tokens: int, seed: int, end_tokens: Sequence[int]
    ) -> dict[str, Any]:
        """`sampling_seed` has an effect if the server was started with --enable-deterministic-inference. `ignore_eos` would also
        ignore `stop_token_ids`."""
        how: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": seed % 2**31,
            "stop_token_ids": list(end_tokens),
            "ignore_eos": not end_tokens,
        }
        if sampling.temperature > 0:
            how |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": sampling.min_p}
        if sampling.stop:
            how["stop"] = list(sampling.stop)
        return {"input_ids": tokens.tolist(), "sampling_params": how, "return_logprob": True}

    def read(self, answer: Any, version: int) -> tuple[list[int], list[float]]:
        try:
            info = answer["meta_info"]
            reason, label = info["finish_reason"], info["weight_version"]
            if reason["type"] == "abort":
                raise ServerLost(f"it aborted a sample: {reason.get('message')}")
            logprobs, tokens = ([triple[i] for triple in info["output_token_logprobs"]] for i in range(2))
        except (KeyError, TypeError, IndexError) as error:
            raise BadAnswer(
                f"no tokens with log-probs and weight_version in its answer {str(answer)[:200]}: SGLang 0.5.3 or later is needed"
            ) from error
        if reason.get("matched") == NOT_FINITE:
            raise BadAnswer("its logits are not finite: the policy's weights, or their dtype on the server, are broken")
        if self._label is None or label != self._label:
            raise ServerLost(f"it sampled with weights {label!r} instead of {self._label!r}")
        require_logprobs(tokens, logprobs)
        return tokens, logprobs

    # Weights -----------------------------------------------------------------------------------------------------------

    def load(self, server: Server, weights: Weights, version: int, *, first: bool) -> None:
        """A label is never used twice, not even for the same version, so an answer by other weights is always noticed."""
        self._label = None
        self._pushes += 1
        label = f"plaudit-{version}-{self._pushes}"
        folder = server.folder / "weights"
        with weight_files(folder, weights):
            # Without load_format it would be that of the server's start: dummy.
            body = {"model_path": str(folder), "load_format": "auto", "abort_all_requests": True, "weight_version": label}
            answer = server.call("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise BadAnswer(f"it did not load the policy's weights: {str(answer)[:500]}")
        self._label = label

    # Memory ------------------------------------------------------------------------------------------------------------

    def sleep(self, server: Server) -> None:
        """SGLang fails if a request is still running, as one that was just cancelled may be."""
        self._label = None
        server.call("/abort_request", {"rid": "", "abort_all": True})
        server.until_done("/flush_cache")
        server.call("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def wake(self, server: Server, what: str) -> None:
        server.call("/resume_memory_occupation", {"tags": [what]})
