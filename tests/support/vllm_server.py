"""A stand-in for a vLLM server: the routes that plaudit uses, around the policy's own model in transformers, with plaudit's own
gate and worker methods.

    PYTHONPATH=plaudit/rollout/served/worker:plaudit/servers/inside PLAUDIT_SERVER_TOKEN=KEY \\
        python vllm_server.py --model FOLDER --host HOST --port 8000

It takes no LoRA adapters. The word in the file FAULT of its model's folder, if there is one, says how it misbehaves: `hang` or
`die`.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

import torch
import uvicorn
from plaudit_vllm import PolicyWeights, VersionGate
from transformers import AutoConfig, AutoModelForCausalLM


def load_weights(model: Any, weights: Any) -> set[str]:
    parameters, loaded = dict(model.named_parameters()), set()
    with torch.no_grad():
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            loaded.add(name)
    return loaded


class Worker(PolicyWeights):
    device = torch.device("cpu")

    def __init__(self, folder: str, dtype: str):
        torch.manual_seed(os.getpid())
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)).eval()
        model.__class__ = type("Model", (type(model),), {"load_weights": load_weights})
        self.model, self.model_runner = model, self

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.model.load_weights(weights_iterator)


class Server:
    """An ASGI application."""

    def __init__(self, worker: Worker, folder: Path):
        self.worker, self.fault = worker, folder / "FAULT"
        self.computed = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, content = await self.answer(scope["path"], json.loads(body) if body and body != b"null" else {})
        kind = b"text/plain" if isinstance(content, str) else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        encoded = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        await send({"type": "http.response.body", "body": encoded})

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/health" | "/reset_prefix_cache":
                return 200, ""
            case "/metrics":
                return 200, f'# HELP\nvllm:generation_tokens_total{{engine="0"}} {float(self.computed)}\n'
            case "/collective_rpc":
                method = getattr(self.worker, body["method"])
                return 200, {"results": [await asyncio.to_thread(method, *body.get("args", ()))]}
            case "/v1/completions":
                return 200, await self.sample(body)
        return 404, {"detail": "Not Found"}

    async def sample(self, body: dict[str, Any]) -> dict[str, Any]:
        match self.fault.read_text() if self.fault.exists() else "":
            case "hang":
                await asyncio.sleep(3600)
            case "die":
                os._exit(9)
        tokens, logprobs = list(body["prompt"]), []
        generator = torch.Generator().manual_seed(body["seed"])
        while len(logprobs) < body["max_tokens"]:
            with torch.no_grad():
                logits = self.worker.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tempered = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            token = int(tempered.exp().multinomial(1, generator=generator) if body["temperature"] else tempered.argmax())
            tokens.append(token)
            logprobs.append(float(tempered[token]))
            self.computed += 1
            await asyncio.sleep(0)  # others' turn
            if token in body["stop_token_ids"]:
                break
        sampled = tokens[len(body["prompt"]) :]
        return {"choices": [{"token_ids": sampled, "logprobs": {"token_logprobs": logprobs}}]}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    app = VersionGate(Server(Worker(given.model, given.dtype), Path(given.model)))
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
