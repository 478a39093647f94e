"""What every engine must do: subclass `EngineContract` and add a fixture `subject` with the engine under test.

Only `Engine`, `Request`, `Sampling` and `Sample` are used. The reference is transformers with the trainer's model: full
forward passes with eager attention, and `generate`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from plaudit.errors import PlauditError
from plaudit.rollout.engine import Engine, Request, Sampling, Weights
from plaudit.types import Sample

CLOSE = 1e-4
"""Tolerance for log-probs in fp32."""
LENGTHS = (1, 300, 7, 2, 64, 31)


@dataclass(frozen=True)
class Subject:
    """The engine under test and the model whose weights it samples with: fp32, untied embeddings, several end tokens."""

    engine: Engine
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]

    def sync(self, version: int) -> None:
        """Give the engine the model's current weights."""
        self.engine.sync(version, Weights(self.model))

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """Samples sorted by request, then by index."""
        order = [request.prompt_id for request in requests]
        return sorted(self.engine.generate(requests, sampling), key=lambda s: (order.index(s.prompt_id), s.index))


# The model and the transformers reference ----------------------------------------------------------------------------


def sharpen(model: PreTrainedModel, ends: int = 10) -> PreTrainedModel:
    """Scale up random weights so that outputs depend on the input, and add end tokens so that responses end."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    first = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [first if isinstance(first, int) else first[0], *range(40, 40 + ends - 1)]
    return model


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Tensor]:
    """Logits [t, V] of each response in (prompt, response), from one right-padded forward pass of transformers."""
    tokens = torch.zeros(len(sequences), max(len(prompt) + len(response) for prompt, response in sequences), dtype=torch.int64)
    for row, (prompt, response) in zip(tokens, sequences, strict=True):
        row[: len(prompt) + len(response)] = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with attention(model, "eager"):
        logits = model(input_ids=tokens, use_cache=False).logits
    return [
        row[len(prompt) - 1 : len(prompt) + len(response) - 1].float()
        for row, (prompt, response) in zip(logits, sequences, strict=True)
    ]


def logprobs_from(logits: Tensor, response: np.ndarray, temperature: float) -> np.ndarray:
    chosen = torch.from_numpy(response.astype(np.int64))[:, None]
    return (logits / temperature).log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


def full_logits(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> Tensor:
    return reference_logits(model, [(prompt, response)])[0]


def full_logprobs(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    return logprobs_from(full_logits(model, prompt, response), response, temperature)


def greedy(model: PreTrainedModel, prompt: np.ndarray, max_new_tokens: int) -> list[int]:
    """The greedy response of `generate`."""
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    with attention(model, "eager"):
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_new_tokens)
    return out[0, len(prompt) :].tolist()


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(1000 * seed + length).randint(3, 300, length).astype(np.int32)


def requests_of(lengths: Sequence[int], n: int = 1, **settings) -> list[Request]:
    return [Request(f"p{i}", prompt_of(length, i), n, **settings) for i, length in enumerate(lengths)]


def assert_logprobs(sample: Sample, logits: Tensor, temperature: float, close: float = CLOSE) -> None:
    """`logits`: those of the reference."""
    assert len(sample.sampler_logprobs) == len(sample.tokens) == len(sample)
    tempered = logprobs_from(logits, sample.tokens, temperature or 1.0)
    np.testing.assert_allclose(sample.sampler_logprobs, tempered, rtol=0, atol=close)
    if sample.untempered_logprobs is not None:
        np.testing.assert_allclose(sample.untempered_logprobs, logprobs_from(logits, sample.tokens, 1.0), rtol=0, atol=close)


def same_tokens(a: Sequence[Sample], b: Sequence[Sample]) -> bool:
    return [s.tokens.tolist() for s in a] == [s.tokens.tolist() for s in b]


# A model that emits a given text -------------------------------------------------------------------------------------


@contextmanager
def changed_weights(subject: Subject) -> Iterator[None]:
    """Restores the weights on exit."""
    kept, version = {name: p.detach().clone() for name, p in subject.model.named_parameters()}, subject.engine.version
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in subject.model.named_parameters():
                p.copy_(kept[name])
        subject.sync(version)


@contextmanager
def rigged_to_emit(subject: Subject, chain: Sequence[int]) -> Iterator[None]:
    """Each token is almost surely followed by the next one in the chain; the last by an end token."""
    assert len(set(chain)) == len(chain), "a token may occur only once"
    with changed_weights(subject), torch.no_grad():
        for name, p in subject.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()  # a token's hidden state is its embedding
        embedding, head = subject.model.get_input_embeddings().weight, subject.model.get_output_embeddings().weight
        assert embedding is not head
        head.zero_()
        for token, following in pairwise([*chain, subject.ends[0]]):
            head[following] = 6 * embedding[token] / embedding[token].norm()
        subject.sync(subject.engine.version)
        with torch.enable_grad():
            yield


FIRST = b"What"
PIECES = (
    *(b" the", b" answer", b" is", b"\xe2", b"\x98", b"\x95", b"c", b"a", b"f", b"\xc3", b"\xa9", b" 1", b"2", b"\n"),
    *(b"S", b"T", b"O", b"P", b" 4", b"\xf0", b"\x9f", b"\x8e", b"\x89", b".", b" makes", b" number", b"!", b"x", b"y", b"z"),
)
WRITTEN = b"".join(PIECES).decode()
assert WRITTEN == " the answer is☕café 12\nSTOP 4🎉. makes number!xyz"


def ids_of(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[bytes]) -> list[int]:
    written = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids("".join(written[byte] for byte in piece)) for piece in pieces]


def pieces_up_to(end: int) -> int:
    """How many pieces it takes to write the first `end` characters."""
    needed, written = len(WRITTEN[:end].encode()), np.cumsum([len(piece) for piece in PIECES])
    return int((written < needed).sum()) + 1


# The contract --------------------------------------------------------------------------------------------------------


def needs_keyed_noise(test: Callable[..., None]) -> Callable[..., None]:
    """Skipped for an engine that declares `keyed_noise=False`."""

    @wraps(test)
    def checked(self, subject, **fixtures):
        if not subject.engine.capabilities.keyed_noise:
            pytest.skip("declared: keyed_noise=False")
        test(self, subject, **fixtures)

    return checked


class EngineContract:
    # Samples

    def test_every_sample_is_returned_exactly_once(self, subject):
        requests = [Request(f"p{i}", prompt_of(length, i), n=1 + i % 4) for i, length in enumerate(LENGTHS)]
        returned = sorted((s.prompt_id, s.index) for s in subject.engine.generate(requests, Sampling(max_new_tokens=12)))
        assert returned == sorted((r.prompt_id, index) for r in requests for index in range(r.n))

    def test_no_samples_requested(self, subject):
        assert list(subject.engine.generate([], Sampling(max_new_tokens=4))) == []
        requests = [replace(r, n=n) for r, n in zip(requests_of((5, 3, 4)), (0, 2, 0), strict=True)]
        assert [(s.prompt_id, s.index) for s in subject.sample(requests, Sampling(max_new_tokens=4))] == [("p1", 0), ("p1", 1)]

    def test_tokens_status_and_text_are_consistent(self, subject):
        """Finished if it ends in an end token, truncated if it reaches its limit; nothing follows an end token."""
        limits = (1, 40, 3, 17, 64, None)
        requests = [replace(r, max_new_tokens=limit) for r, limit in zip(requests_of(LENGTHS, n=4), limits, strict=True)]
        samples = subject.sample(requests, Sampling(max_new_tokens=25))
        limit_of = {r.prompt_id: r.max_new_tokens or 25 for r in requests}
        for sample in samples:
            limit, ends = limit_of[sample.prompt_id], np.isin(sample.tokens, subject.ends)
            assert 1 <= len(sample.tokens) <= limit
            assert not ends[:-1].any()
            assert sample.status == ("finished" if ends[-1] else "truncated")
            assert sample.status == "finished" or len(sample.tokens) == limit
            assert sample.text == subject.tokenizer.decode(sample.tokens, skip_special_tokens=True)
        assert {s.status for s in samples if limit_of[s.prompt_id] > 3} == {"finished", "truncated"}, "or the test shows nothing"

    def test_an_end_token_at_the_limit_finishes_the_sample(self, subject):
        chain = ids_of(subject.tokenizer, [FIRST, b"a", b"b"])
        with rigged_to_emit(subject, chain):
            for limit, status in [(1, "truncated"), (2, "truncated"), (3, "finished"), (4, "finished")]:
                request = Request("p", np.array(chain[:1]), max_new_tokens=limit)
                (sample,) = subject.sample([request], Sampling(max_new_tokens=50, temperature=0.0))
                assert sample.tokens.tolist() == [*chain[1:], subject.ends[0]][:limit]
                assert sample.status == status

    def test_samples_carry_the_version_of_the_weights(self, subject):
        for version in (3, 4, 11):
            subject.sync(version)
            assert {s.version for s in subject.sample(requests_of((4, 9), n=2), Sampling(max_new_tokens=3))} == {version}

    # Log-probs

    @pytest.mark.parametrize(
        "how",
        [{}, {"temperature": 0.7}, {"temperature": 1.6}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"min_p": 0.1}],
        ids=str,
    )
    def test_logprobs_match_a_full_forward_pass(self, subject, how):
        requests, sampling = requests_of(LENGTHS, n=2), Sampling(max_new_tokens=24, **how)
        if sampling.truncates and not subject.engine.capabilities.truncated_logprobs:
            pytest.skip("declared: truncated_logprobs=False")
        samples = subject.sample(requests, sampling)
        prompts = {r.prompt_id: r.tokens for r in requests}
        logits = reference_logits(subject.model, [(prompts[sample.prompt_id], sample.tokens) for sample in samples])
        for sample, expected in zip(samples, logits, strict=True):
            assert_logprobs(sample, expected, sampling.temperature)
        assert any(len(s) > 10 for s in samples)

    # Greedy

    def test_greedy_matches_generate(self, subject):
        requests = requests_of(LENGTHS)
        samples = subject.sample(requests, Sampling(max_new_tokens=20, temperature=0.0))
        for request, sample in zip(requests, samples, strict=True):
            assert sample.tokens.tolist() == greedy(subject.model, request.tokens, 20)
            assert_logprobs(sample, full_logits(subject.model, request.tokens, sample.tokens), temperature=0.0)
        assert len({tuple(s.tokens) for s in samples}) > 1

    def test_greedy_samples_of_a_prompt_are_equal(self, subject):
        samples = subject.sample(requests_of((6,), n=3), Sampling(max_new_tokens=20, temperature=0.0))
        assert len(samples) == 3
        assert len({tuple(s.tokens) for s in samples}) == 1

    def test_top_k_of_one_is_greedy(self, subject):
        requests = requests_of((6, 20), n=2)
        assert same_tokens(
            subject.sample(requests, Sampling(max_new_tokens=12, top_k=1)),
            subject.sample(requests, Sampling(max_new_tokens=12, temperature=0.0)),
        )

    # Keys

    @needs_keyed_noise
    def test_the_same_keys_give_the_same_tokens(self, subject):
        requests, sampling = requests_of((6, 1, 20), n=3), Sampling(max_new_tokens=16, seed=5, step=2)
        first, again = subject.sample(requests, sampling), subject.sample(requests, sampling)
        assert same_tokens(first, again)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, rtol=0, atol=1e-5)

    @needs_keyed_noise
    @pytest.mark.parametrize("other", [{"seed": 6}, {"step": 3}], ids=["seed", "step"])
    def test_another_seed_or_step_gives_other_tokens(self, subject, other):
        requests, sampling = requests_of((6, 1, 20), n=3), Sampling(max_new_tokens=16, seed=5, step=2)
        first, second = subject.sample(requests, sampling), subject.sample(requests, replace(sampling, **other))
        assert not any(same_tokens([a], [b]) for a, b in zip(first, second, strict=True))

    def test_another_index_or_prompt_id_gives_other_tokens(self, subject):
        requests = [Request(name, prompt_of(9), n=6) for name in ("a", "b")]
        samples = subject.sample(requests, Sampling(max_new_tokens=16))
        assert len({tuple(s.tokens) for s in samples}) == 12

    def test_every_position_draws_independently(self, subject):
        """If all tokens are equally likely, a response seldom repeats one."""
        with changed_weights(subject):
            subject.model.get_output_embeddings().weight.data.zero_()
            subject.sync(subject.engine.version)
            samples = subject.sample(requests_of((6, 20), n=6), Sampling(max_new_tokens=20))
        tokens = np.concatenate([s.tokens for s in samples])
        assert sum(len(set(s.tokens.tolist())) for s in samples) > 0.9 * len(tokens) > 100
        assert len(set(tokens.tolist())) > 0.6 * len(tokens)

    @needs_keyed_noise
    def test_more_samples_do_not_change_the_first_ones(self, subject):
        few = subject.sample([Request("a", prompt_of(9), n=2)], Sampling(max_new_tokens=16))
        many = subject.sample([Request("a", prompt_of(9), n=5)], Sampling(max_new_tokens=16))
        assert same_tokens(few, many[:2])

    # Stop strings

    def write(self, subject, *stop: str, limit: int = 60, **how) -> Sample:
        """The response of the rigged model, the same in a request for one sample and in one for two."""
        prompt = np.array(ids_of(subject.tokenizer, [FIRST]))
        sampling = Sampling(max_new_tokens=limit, temperature=0.0, stop=stop, **how)
        samples = subject.sample([Request("a", prompt), Request("b", prompt, n=2)], sampling)
        assert len({(s.status, s.text, *s.tokens.tolist()) for s in samples}) == 1
        return samples[0]

    @pytest.fixture
    def chain(self, subject) -> Iterator[list[int]]:
        """Makes the subject emit WRITTEN."""
        chain = ids_of(subject.tokenizer, [FIRST, *PIECES])
        with rigged_to_emit(subject, chain):
            yield chain[1:]

    @pytest.mark.parametrize(
        "stop",
        [
            "answer",  # begins within a token
            "ans",  # begins and ends within one
            "nswer is",
            "r i",  # begins within one and ends within another
            "☕",  # three tokens
            "s☕c",
            "é",
            "fé 1",
            "\nSTOP",
            "🎉",
            "🎉. m",
            " 12\nSTOP 4🎉. makes number!xyz",  # long
            WRITTEN,
            " ",  # in the first token
        ],
        ids=repr,
    )
    def test_a_stop_string_ends_a_response(self, subject, chain, stop):
        """Text is cut right after it; tokens are kept up to the one that completes it."""
        sample = self.write(subject, stop)
        end = WRITTEN.index(stop) + len(stop)
        assert sample.text == WRITTEN[:end]
        assert sample.tokens.tolist() == chain[: pieces_up_to(end)]
        assert sample.status == "finished"
        assert len(sample.sampler_logprobs) == len(sample.tokens)

    def test_the_first_stop_string_wins(self, subject, chain):
        for stops in (("STOP", "☕", "xyz"), ("xyz", "☕"), ("never", "☕")):
            assert self.write(subject, *stops).text == WRITTEN[: WRITTEN.index("☕") + 1]
        assert self.write(subject, "answer", "ans", "wer").text == " the ans", "the earliest of those completed by one token"

    @pytest.mark.parametrize("stop", ["answers", "Café", "é1", "What", "What the", "☕☕", "<|im_end|>"])
    def test_a_stop_string_that_never_occurs_changes_nothing(self, subject, chain, stop):
        """Neither the prompt nor the name of an end token counts."""
        sample = self.write(subject, stop)
        assert sample.text == WRITTEN
        assert sample.tokens.tolist() == [*chain, subject.ends[0]]
        assert sample.status == "finished"

    def test_a_stop_string_at_the_limit_finishes_the_sample(self, subject, chain):
        completed = pieces_up_to(WRITTEN.index("STOP") + 4)
        assert self.write(subject, "STOP", limit=completed).status == "finished"
        before = self.write(subject, "STOP", limit=completed - 1)
        assert (before.status, before.text) == ("truncated", WRITTEN[: WRITTEN.index("STOP") + 3])

    @needs_keyed_noise
    def test_stop_strings_only_cut_the_response(self, subject):
        """Each sample equals the one without stop strings, up to its first stop string."""
        requests, sampling, stops = requests_of((6, 20), n=8), Sampling(max_new_tokens=40), ("e", " 1", "t")
        full, cut = subject.sample(requests, sampling), subject.sample(requests, replace(sampling, stop=stops))
        stopped = 0
        for a, b in zip(full, cut, strict=True):
            texts = [subject.tokenizer.decode(a.tokens[: i + 1], skip_special_tokens=True) for i in range(len(a))]
            last = next((i for i, text in enumerate(texts) if any(s in text for s in stops)), None)
            if last is None:
                assert (a.text, a.status) == (b.text, b.status)
            else:
                stopped += 1
                assert b.status == "finished"
                assert b.text == texts[last][: min(texts[last].index(s) + len(s) for s in stops if s in texts[last])]
            assert b.tokens.tolist() == a.tokens[: len(a) if last is None else last + 1].tolist()
        assert 2 <= stopped < len(full)

    # Streaming

    def seed_of_long_sample(self, subject, request: Request) -> int:
        """A seed with which the request's sample reaches its limit."""
        limit = request.max_new_tokens
        return next(
            seed for seed in range(200) if len(subject.sample([request], Sampling(max_new_tokens=limit, seed=seed))[0]) == limit
        )

    def test_samples_are_yielded_while_others_run(self, subject):
        """The short one comes first, in either order of the requests."""
        long, short = Request("long", prompt_of(6), max_new_tokens=64), Request("short", prompt_of(5), max_new_tokens=1)
        sampling = Sampling(max_new_tokens=100, seed=self.seed_of_long_sample(subject, long))
        for requests in ([long, short], [short, long]):
            samples = subject.engine.generate(requests, sampling)
            assert [(s.prompt_id, len(s)) for s in samples] == [("short", 1), ("long", 64)]

    @needs_keyed_noise
    def test_closing_early_cancels_all_requests(self, subject):
        requests, sampling = requests_of((6, 20, 3), n=2), Sampling(max_new_tokens=32)
        expected = subject.sample(requests, sampling)
        for taken in (0, 1, 3):
            samples = subject.engine.generate([replace(r, prompt_id=f"closed {r.prompt_id}") for r in requests], sampling)
            for _ in range(taken):
                next(samples)
            samples.close()
            assert list(samples) == []
        assert same_tokens(subject.sample(requests, sampling), expected), "and nothing of the closed calls comes later"

    @needs_keyed_noise
    def test_gradients_can_be_computed_between_samples(self, subject):
        model, requests, sampling = subject.model, requests_of((6, 20, 3), n=2), Sampling(max_new_tokens=24)

        def gradient() -> Tensor:
            model.train()
            model.zero_grad()
            with attention(model, "eager"):
                model(input_ids=torch.arange(3, 30)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        expected, undisturbed = gradient(), subject.sample(requests, sampling)
        assert expected.norm() > 0
        order, samples = [(s.prompt_id, s.index) for s in undisturbed], []
        for sample in subject.engine.generate(requests, sampling):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert torch.equal(gradient(), expected)
            samples.append(sample)
        assert same_tokens(sorted(samples, key=lambda s: order.index((s.prompt_id, s.index))), undisturbed)
        assert torch.equal(gradient(), expected)
        model.zero_grad()

    # Weights

    def test_it_samples_with_the_current_weights(self, subject):
        """Changed in place, as a trainer changes them."""
        requests, sampling = requests_of((6, 20)), Sampling(max_new_tokens=16, temperature=0.0)
        before = subject.sample(requests, sampling)
        with changed_weights(subject):
            for name, p in subject.model.named_parameters():
                if "layers." in name and p.ndim == 2:
                    p.data.mul_(1.5)
            version = subject.engine.version + 1
            subject.sync(version)
            after = subject.sample(requests, sampling)
            assert {s.version for s in after} == {version}
            for request, a, b in zip(requests, before, after, strict=True):
                assert b.tokens.tolist() == greedy(subject.model, request.tokens, 16) != a.tokens.tolist()
                assert_logprobs(b, full_logits(subject.model, request.tokens, b.tokens), temperature=0.0)
        assert same_tokens(subject.sample(requests, sampling), before)

    # Limits of prompts

    @pytest.mark.parametrize("bad", ["empty", "too long", "too long with its answer"])
    def test_invalid_prompts_are_rejected(self, subject, bad):
        """The error names the prompt, and the engine stays usable."""
        context = subject.model.config.max_position_embeddings
        length = {"empty": 0, "too long": context + 1, "too long with its answer": context - 15}[bad]
        requests = [*requests_of((5,)), Request("culprit", prompt_of(length))]
        with pytest.raises(PlauditError, match="culprit"):
            list(subject.engine.generate(requests, Sampling(max_new_tokens=16)))
        assert len(subject.sample(requests_of((5,)), Sampling(max_new_tokens=16))) == 1

    def test_a_context_can_be_filled_to_its_last_token(self, subject):
        context = subject.model.config.max_position_embeddings
        requests = [Request("full", prompt_of(context - 4)), *requests_of((3,), n=2)]
        samples = subject.sample(requests, Sampling(max_new_tokens=4, temperature=0.0))
        assert len(samples) == 3
        assert samples[0].tokens.tolist() == greedy(subject.model, requests[0].tokens, 4)
