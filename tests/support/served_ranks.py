"""A sharded policy in two processes, sampled by servers (stand-ins for vLLM's); `main` is the program of each process."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.sharded import shard_model
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings, RolloutSettings
from plaudit.rollout.engine import EngineSetup, Sampling, Weights
from plaudit.rollout.served import engine as served
from plaudit.rollout.served.engine import VllmEngine
from plaudit.world import World
from support.engine_contract import requests_of, sharpen

REQUESTS, SAMPLING = requests_of((4, 9), n=2), Sampling(max_new_tokens=6)


def main() -> None:
    """Writes the samples of two versions, and whether this process's server was lost before the second."""
    rank, model, scratch, server = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'rendezvous'}", rank=rank, world_size=2)
    world = World.joined()
    served.PAUSE_S = 0.0
    tokenizer = load_tokenizer(str(model))
    policy = load_policy(ModelSettings(path=str(model), dtype="float32"), load_template(tokenizer, None), world.device)
    sharpen(policy.model)
    shard_model(policy.model, world)
    setup = EngineSetup(RolloutSettings(engine="vllm", server=server), policy.model, tokenizer, world)
    found: dict[str, Any] = {}
    with closing(VllmEngine(setup)) as engine:
        for version in range(2):
            if version == 1:
                double(policy.model)
                if rank == 1:
                    engine._servers[0].kill()  # one that runs already is not ended by this
            engine.sync(version, Weights(policy.model))
            world.wait("both servers have their weights")
            samples = sorted(engine.generate(REQUESTS, SAMPLING), key=lambda sample: (sample.prompt_id, sample.index))
            found[str(version)] = [(s.prompt_id, s.tokens.tolist(), s.sampler_logprobs.tolist()) for s in samples]
            assert {sample.version for sample in samples} == {version}
            world.wait("both have sampled")
        found["restarts"] = engine._restarts
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def double(model: torch.nn.Module) -> None:
    """What a training step might do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
