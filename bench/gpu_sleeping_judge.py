"""A launched judge that sleeps beside a policy on one GPU: what it gives back, and how long that takes.

    python bench/gpu_sleeping_judge.py --program .venv-vllm/bin/python            # a judge of 0.5B: three minutes on an H200
    python bench/gpu_sleeping_judge.py --program .venv-vllm/bin/python --size 7B

Random weights of Qwen2.5's shapes in bf16, made here. The policy is on the GPU all the time, as it is in a run. In each round the
judge answers, sleeps, and is woken; its log-probs of a prompt have to stay the same. Memory in use is the driver's number for the
whole GPU.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import torch
from memory_plan import make_model

from plaudit.data.templates import load_model_template
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import GenerationRequest, SamplingParams
from plaudit.reward_models.launch import LaunchedModel

OPTIONS = {"vllm": ("--gpu-memory-utilization", "--max-model-len"), "sglang": ("--mem-fraction-static", "--context-length")}
REQUESTS = [GenerationRequest([], text=f"{i} {'word ' * 200}") for i in range(64)]


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


async def seconds(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def logprobs(server: LaunchedModel) -> list[float]:
    """Of eight tokens after a prompt: they show whether the weights are still there. (The tokenizer knows few of a random model's
    tokens, so answers have hardly any text.)"""
    assert server._client is not None
    connection = server._client._connection
    [replica] = connection.replicas.all
    body = {"model": replica.model, "prompt": list(range(5, 300)), "max_tokens": 8, "temperature": 0.0, "logprobs": 1}
    response = await connection.send(replica, "/v1/completions", 60.0, body)
    assert isinstance(response, tuple), response
    return json.loads(response[1])["choices"][0]["logprobs"]["token_logprobs"]


async def measure(server: LaunchedModel, rounds: int) -> dict[str, list[float]]:
    params = SamplingParams(max_new_tokens=64)
    rows: dict[str, list[float]] = {"awake, GB": [], "asleep, GB": [], "to sleep, s": [], "to wake, s": [], "64 answers, s": []}
    before, largest = await logprobs(server), 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        answers = await server.generate(REQUESTS, params)
        if failures := [answer.failure for answer in answers if answer.failure is not None]:
            raise SystemExit(f"the judge did not answer: {failures[0]}")
        rows["64 answers, s"].append(time.perf_counter() - began)
        rows["awake, GB"].append(used_gb())
        rows["to sleep, s"].append(await seconds(server.unload()))
        rows["asleep, GB"].append(used_gb())
        rows["to wake, s"].append(await seconds(server.load()))
        after = await logprobs(server)
        largest = max(largest, *(abs(one - other) for one, other in zip(before, after, strict=True)))
    print(f"largest difference of its log-probs after it slept: {largest:.1e}")
    return rows


async def run(judge: Path, given: argparse.Namespace) -> None:
    share, context = OPTIONS[given.dialect]
    arguments = (f"{share} {given.share}", f"{context} 2048", *given.arguments)
    settings = {"path": str(judge), "placement": "launch", "sleep": True, "program": given.program, "dialect": given.dialect}
    model = RewardModel.model_validate({**settings, "arguments": arguments})
    server = LaunchedModel(model, ModelLimits(start_timeout_s=900.0), log=judge.parent / "server.log")
    without = used_gb()
    try:
        began = time.perf_counter()
        await server.open()
        started = time.perf_counter() - began
        rows = await measure(server, given.rounds)
    finally:
        await server.close()
    print(f"\njudge {given.size} on {given.share:.0%} of the GPU, started in {started:.0f} s")
    print(f"policy {given.policy}, which alone takes {without:.1f} GB")
    print(f"medians of {given.rounds} (smallest–largest)\n\n| | |\n| --- | --- |")
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="The Python that has vLLM (or SGLang); default: this one.")
    parser.add_argument("--dialect", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--size", default="0.5B", help="of the judge")
    parser.add_argument("--policy", default="0.5B")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory, for the judge's server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arguments", nargs="*", default=[], help="further ones of the server")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-sleeping-judge-"))
    try:
        (folder / "data.jsonl").write_text(json.dumps({"prompt": "word " * 60, "response": "word"}) + "\n")
        models = {size: make_model(size, folder, "cuda") for size in {given.size, given.policy}}
        settings = ModelSettings(path=str(models[given.policy]))
        policy = load_policy(settings, load_model_template(settings), torch.device("cuda"))
        asyncio.run(run(models[given.size], given))
        del policy
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
