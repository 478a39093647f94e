"""A rollout engine of your own: transformers, one sample at a time. Slow, but complete.

In a recipe: `rollout: {engine: docs/transformers_engine.py:TransformersEngine}`.
"""

import copy

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from plaudit.errors import PlauditError
from plaudit.rollout.engine import Engine, EngineSetup
from plaudit.seeding import stable_seed
from plaudit.types import Sample


class TransformersEngine(Engine):
    def __init__(self, setup: EngineSetup):
        self.tokenizer, ends = setup.tokenizer, setup.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        config = copy.deepcopy(setup.model.config)  # a model built from the policy's own config would change the policy's attention
        self.model = AutoModelForCausalLM.from_config(config, dtype=setup.model.dtype, attn_implementation="sdpa")
        self.model.to(setup.world.device).eval()  # its own copy, filled by the first sync

    def sync(self, version, weights):
        self.model.load_state_dict(dict(weights))
        self.version = version

    def generate(self, requests, sampling):
        for request in requests:
            context = getattr(self.model.config, "max_position_embeddings", None)
            limit = request.max_new_tokens or sampling.max_new_tokens
            if not len(request.tokens) or (context and len(request.tokens) + limit > context):
                raise PlauditError(f"prompt {request.prompt_id}: {len(request.tokens)} tokens do not fit; the context is {context}")
        for request in sorted(requests, key=lambda request: request.max_new_tokens or sampling.max_new_tokens):
            for index in range(request.n):
                yield self._sample(request, index, sampling)

    @torch.no_grad()
    def _sample(self, request, index, sampling):
        # Keyed by what the sample is, not by when it is drawn: a resumed run draws it again.
        noise = torch.Generator().manual_seed(stable_seed("sample", sampling.seed, sampling.step, request.prompt_id, index))
        warpers = [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        inputs = torch.tensor(request.tokens, dtype=torch.long, device=self.model.device)[None]
        cache, tokens, logprobs, untempered, status = DynamicCache(), [], [], [], "truncated"
        for _ in range(request.max_new_tokens or sampling.max_new_tokens):
            logits = self.model(inputs, past_key_values=cache).logits[:, -1].float()
            tempered = logits / (sampling.temperature or 1.0)
            scores = tempered
            for warper in warpers:
                scores = warper(inputs, scores)
            greedy = sampling.temperature == 0
            token = int(scores.argmax() if greedy else torch.multinomial(scores.softmax(-1).cpu(), 1, generator=noise))
            tokens.append(token)
            self.on_step(1)  # shows progress, and leaves here if the run is asked to stop
            logprobs.append(tempered.log_softmax(-1)[0, token].item())
            untempered.append(logits.log_softmax(-1)[0, token].item())
            inputs = torch.tensor([[token]], device=self.model.device)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if stopped := [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]:
                text = text[: min(stopped)]  # cut right after the stop string, even inside a token
            if stopped or token in self.ends:
                status = "finished"
                break
        arrays = (np.array(values, dtype=np.float32) for values in (logprobs, untempered))
        return Sample(request.prompt_id, index, np.array(tokens, dtype=np.int32), text, status, *arrays, self.version)
