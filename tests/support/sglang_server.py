"""A stand-in for an SGLang server: SGLang's routes and rules, around a small Llama that computes in numpy and starts at once.

    python sglang_server.py --model-path FOLDER --port 30000 --config FILE … --fault-file FILE

Requests are checked strictly: an unknown field or a wrong type is an error. What SGLang's scheduler would not survive ends this
process too. The word in the fault file, if there is one, says how it misbehaves: see `Server.generate`.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

DEFAULT_VERSION = "default"
EVERYTHING = 1 << 30


class Llama:
    """The model of a config.json, in fp32. Weights are random until some are loaded."""

    def __init__(self, config: dict[str, Any]):
        assert config["architectures"] == ["LlamaForCausalLM"]
        self.layers, self.heads, self.kv_heads = (
            config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
        )
        self.size, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.frequencies = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, self.size, 2) / self.size)
        hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        queries, keys = self.heads * self.size, self.kv_heads * self.size
        shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
        for i in range(self.layers):
            shapes |= {
                f"model.layers.{i}.self_attn.{name}_proj": (out, hidden)
                for name, out in zip("qkv", (queries, keys, keys), strict=True)
            }
            shapes |= {f"model.layers.{i}.self_attn.o_proj": (hidden, queries), f"model.layers.{i}.mlp.down_proj": (hidden, inner)}
            shapes |= {f"model.layers.{i}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
            shapes |= {f"model.layers.{i}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        random = np.random.default_rng()
        self.weights = {f"{name}.weight": random.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}

    def new_cache(self) -> list[np.ndarray]:
        """Keys and values of each layer: [2, kv heads, tokens, size]."""
        return [np.zeros((2, self.kv_heads, 0, self.size), dtype=np.float32) for _ in range(self.layers)]

    def logits(self, tokens: list[int], cache: list[np.ndarray]) -> np.ndarray:
        """Of the token that follows; the cache grows."""
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        before = cache[0].shape[2]
        angles = (before + np.arange(len(tokens)))[:, None] * self.frequencies
        cos, sin = (np.concatenate([part, part], 1).astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
        unseen = np.arange(before + len(tokens)) > before + np.arange(len(tokens))[:, None]
        for i in range(self.layers):
            at = f"model.layers.{i}."
            h = self.norm(x, at + "input_layernorm")
            q, k, v = (
                (h @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(tokens), -1, self.size).swapaxes(0, 1) for name in "qkv"
            )
            q, k = (a * cos + np.concatenate([-a[..., self.size // 2 :], a[..., : self.size // 2]], -1) * sin for a in (q, k))
            cache[i] = np.concatenate([cache[i], np.stack([k, v])], 2)
            keys, values = np.repeat(cache[i], self.heads // self.kv_heads, 1)
            scores = np.where(unseen, -np.inf, q @ keys.swapaxes(1, 2) / self.size**0.5)
            attended = np.exp(log_softmax(scores)) @ values
            x = x + attended.swapaxes(0, 1).reshape(len(tokens), -1) @ w[at + "self_attn.o_proj.weight"].T
            h = self.norm(x, at + "post_attention_layernorm")
            gate, up = (h @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        return self.norm(x[-1:], "model.norm")[0] @ w["lm_head.weight"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.weights[f"{name}.weight"]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingParams(Strict):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None


class Generate(Strict):
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False


class UpdateWeights(Strict):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


class Memory(Strict):
    tags: list[str] | None = None


class Abort(Strict):
    rid: str = ""
    abort_all: bool = False


def end_ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


class Server:
    def __init__(self, given: argparse.Namespace):
        self.given, self.context = given, given.context_length
        folder = Path(given.model_path)
        config, generation, names = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config", "tokenizer_config")
        )
        derived = config["max_position_embeddings"]
        if self.context > derived and os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
            raise SystemExit(f"ValueError: context_length ({self.context}) is greater than the derived one ({derived})")
        assert given.dtype == "float32"
        self.model, self.tokenizer = Llama(config), Tokenizer.from_file(str(folder / "tokenizer.json"))
        own_end = self.tokenizer.token_to_id(names["eos_token"])
        self.ends = end_ids(config["eos_token_id"]) | end_ids(generation["eos_token_id"]) | end_ids(own_end)
        self.key = yaml.safe_load(Path(given.config).read_text())["api-key"]
        self.version = DEFAULT_VERSION
        self.load_format = given.load_format
        self.released: set[str] = set()
        self.running, self.abort_round = 0, 0

    # Sampling

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def generate(self, request: web.Request) -> web.Response:
        asked = Generate.model_validate(await request.json())
        match self.given.fault_file and self.given.fault_file.exists() and self.given.fault_file.read_text():
            case "die":
                os._exit(9)
            case "hang":
                await asyncio.sleep(3600)
            case "garbage":
                return web.json_response({"text": "hello", "meta_info": {}})
            case "no json":
                return web.Response(text="{", content_type="application/json")
            case "error":
                raise ValueError("out of luck")
            case "not finite":
                reason = {"type": "stop", "matched": "NaN happened"}
                info = {"finish_reason": reason, "weight_version": self.version, "output_token_logprobs": [[-1.0, 2, None]]}
                return web.json_response({"text": "", "output_ids": [2], "meta_info": info})
            case "stale":
                self.version = "of another run"
        how, prompt = asked.sampling_params, asked.input_ids
        if self.released:
            raise ValueError("the memory was released")
        if len(prompt) >= self.context or len(prompt) + how.max_new_tokens > self.context:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        with self.counted():
            tokens, logprobs, reason = await self.sample(prompt, how)
        info: dict[str, Any] = {
            "id": os.urandom(16).hex(),
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        if asked.return_logprob:
            info["output_token_logprobs"] = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
        return web.json_response({"text": self.decode(tokens), "output_ids": tokens, "meta_info": info})

    async def sample(self, prompt: list[int], how: SamplingParams) -> tuple[list[int], list[float], dict[str, Any]]:
        began = self.abort_round
        limit = min(how.max_new_tokens, (self.context - 1) - len(prompt) - 1)
        top_k, temperature = (1, 1.0) if how.temperature < 1e-6 else (how.top_k, how.temperature)
        stops = [how.stop] if isinstance(how.stop, str) else how.stop or []
        reach = max((len(self.tokenizer.encode(stop, add_special_tokens=False).ids) for stop in stops), default=0) + 1
        tokens: list[int] = []
        logprobs: list[float] = []
        cache, new = self.model.new_cache(), prompt
        while True:
            await asyncio.sleep(0)  # others' turn
            if self.abort_round != began:
                return tokens, logprobs, {"type": "abort", "message": "Aborted"}
            logits = self.model.logits(new, cache)
            tempered = log_softmax(logits / temperature)
            original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() in ("1", "true")
            token = self.draw(np.exp(tempered), top_k, how, len(prompt) + len(tokens))
            tokens.append(token)
            logprobs.append(float((log_softmax(logits) if original else tempered)[token]))
            new = [token]
            if len(tokens) >= limit:
                return tokens, logprobs, {"type": "length", "length": limit}
            if not how.ignore_eos and token in self.ends | set(how.stop_token_ids or ()):
                return tokens, logprobs, {"type": "stop", "matched": token}
            tail = self.decode(tokens[-reach:])
            for stop in (stop for stop in stops if stop in tail):
                return tokens, logprobs, {"type": "stop", "matched": stop}

    def draw(self, probs: np.ndarray, top_k: int, how: SamplingParams, position: int) -> int:
        order = np.argsort(-probs, kind="stable")
        ranked = probs[order]
        left = ranked.copy()
        left[top_k if top_k > 0 else EVERYTHING :] = 0
        left[ranked.cumsum() - ranked > how.top_p] = 0
        left[ranked < how.min_p * ranked[0]] = 0
        seed = None
        if self.given.enable_deterministic_inference:
            seed = (42 if how.sampling_seed is None else how.sampling_seed, position)
        return int(order[np.random.default_rng(seed).choice(len(left), p=left / left.sum(dtype=np.float64))])

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    # Control

    async def update_weights(self, request: web.Request) -> web.Response:
        asked = UpdateWeights.model_validate(await request.json())
        load_format = asked.load_format or self.load_format
        if asked.abort_all_requests:
            self.abort_round += 1
        while self.running:
            await asyncio.sleep(0.01)
        files = sorted(Path(asked.model_path).glob("*.safetensors"))
        if load_format == "dummy" or not files or "weights" in self.released:
            content = {"success": False, "message": "Failed to get model loader or weights.", "num_paused_requests": 0}
            return web.json_response(content, status=400)
        for name, weight in (item for file in files for item in load_file(file).items()):
            self.model.weights[name][:] = weight
        self.load_format = load_format
        if asked.weight_version is not None:
            self.version = asked.weight_version
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n", status=400 if self.running else 200)

    async def abort(self, request: web.Request) -> web.Response:
        if Abort.model_validate(await request.json()).abort_all:
            self.abort_round += 1
        return web.Response()

    async def release(self, request: web.Request) -> web.Response:
        """SGLang asserts that it is idle, and frees the memory without a copy."""
        tags = Memory.model_validate(await request.json()).tags or ["kv_cache", "weights"]
        if self.running or not self.given.enable_memory_saver:
            os._exit(1)
        self.released |= set(tags)
        if "weights" in tags:
            for weight in self.model.weights.values():
                weight.fill(np.nan)
        return web.json_response(None)

    async def resume(self, request: web.Request) -> web.Response:
        tags = Memory.model_validate(await request.json()).tags or ["kv_cache", "weights"]
        if not set(tags) <= self.released:
            os._exit(1)  # a KeyError in SGLang's scheduler
        self.released -= set(tags)
        return web.json_response(None)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    @web.middleware
    async def check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except ValidationError as error:
            return web.json_response({"detail": error.errors(include_url=False, include_input=False)}, status=422)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--config", "--load-format", "--dtype", "--device"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--context-length"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--enable-deterministic-inference", "--enable-memory-saver"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--fault-file", type=Path)
    given = parser.parse_args()
    server = Server(given)
    app = web.Application(middlewares=[server.check], client_max_size=1 << 30)
    app.add_routes([
        web.get("/health", server.health),
        web.post("/generate", server.generate),
        web.post("/update_weights_from_disk", server.update_weights),
        web.post("/flush_cache", server.flush_cache),
        web.post("/abort_request", server.abort),
        web.post("/release_memory_occupation", server.release),
        web.post("/resume_memory_occupation", server.resume),
    ])  # fmt: skip
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
