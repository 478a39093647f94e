"""Reward models in this process: results match transformers however requests are batched, and models unload on request."""

import asyncio
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from plaudit.errors import RecipeError
from plaudit.models.residual import has_fp32_residual
from plaudit.models.scalar import ScalarModel, load_scalar, transcript_of
from plaudit.models.weights import RESIDENT_MODELS, HostCopies
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import batch_bisection, scalar_inference
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams, ScalarScore
from plaudit.reward_models.batch_bisection import bisect_failures
from plaudit.reward_models.local import LocalModel
from plaudit.reward_models.model_thread import Closed, ModelThread
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Failure, Message
from support.engine_contract import sharpen
from support.models import BOS_TEMPLATE, make_classifier

CPU = torch.device("cpu")
CLOSE = 1e-5
STRICT = "{% for m in messages if m.role == 'narrator' %}{{ raise_exception('no narrator') }}{% endfor %}"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def settings_of(folder: Path, **settings) -> RewardModel:
    return RewardModel(path=str(folder), device="cpu", **settings)


async def opened(folder: Path, *, scalar: bool, **settings) -> LocalModel:
    model = LocalModel(settings_of(folder, **settings), scalar=scalar)
    try:
        await model.open()
    except RecipeError:
        await model.close()
        raise
    return model


def with_model(folder: Path, use: Callable[[LocalModel], Coroutine[Any, Any, Any]], *, scalar: bool, **settings) -> Any:
    """The result of `use` with the opened model, which is closed afterwards."""

    async def go() -> Any:
        model = await opened(folder, scalar=scalar, **settings)
        try:
            return await use(model)
        finally:
            await model.close()

    return run(go())


def score_all(folder: Path, conversations: Sequence[list[Message]], **settings) -> list[ScalarScore]:
    return with_model(folder, lambda model: model.score(conversations), scalar=True, **settings)


def generate_all(folder: Path, questions: Sequence[GenerationRequest], params: SamplingParams, **settings) -> list[Answer]:
    return with_model(folder, lambda model: model.generate(questions, params), scalar=False, **settings)


def talk(i: int) -> list[Message]:
    """Conversations of different lengths."""
    user = {"role": "user", "content": f"What is {i} + {3 * i}?" + " Think well." * (i % 4)}
    assistant = {"role": "assistant", "content": f"{4 * i}" if i % 2 else f"{i} + {3 * i} makes {4 * i}. " * (1 + i % 5)}
    return [user, assistant, user, assistant] if i % 3 == 0 else [user, assistant]


def question(i: int, **settings) -> GenerationRequest:
    return GenerationRequest(
        [{"role": "user", "content": f"What is {i} + {i}?" + " Think well." * (i % 3)}], **{"key": str(i), **settings}
    )


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def any_classifier(request, tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models[request.param], tmp_path_factory.mktemp("any") / request.param)


@pytest.fixture(scope="module")
def classifier(tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models["llama"], tmp_path_factory.mktemp("scalar") / "rm")


@pytest.fixture(scope="module")
def writer(tiny_models, tmp_path_factory) -> Path:
    """A generative judge whose answers depend on the prompt and sometimes end."""
    folder = tmp_path_factory.mktemp("writer") / "judge"
    sharpen(AutoModelForCausalLM.from_pretrained(tiny_models["qwen2"], dtype=torch.float32)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_models["qwen2"]).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_models_can_be_loaded_concurrently(tiny_models):
    """transformers patches methods of all models while it loads one, so tied weights of another could go missing."""

    async def go() -> None:
        for _ in range(4):
            models = [LocalModel(settings_of(tiny_models[kind]), scalar=False) for kind in ("qwen2", "qwen3", "qwen2")]
            try:
                await asyncio.gather(*(model.open() for model in models))
            finally:
                await asyncio.gather(*(model.close() for model in models))

    run(go())


@torch.no_grad()
def plain_scores(folder: Path, conversations: Sequence[list[Message]]) -> list[float]:
    """The scores of transformers, one conversation at a time, with its own template and head."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer.apply_chat_template(c, return_tensors="pt", return_dict=True)["input_ids"] for c in conversations]
    return [model(input_ids=tokens).logits.item() for tokens in encoded]


# Scalar models -------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
def test_packed_scores_match_transformers(any_classifier):
    conversations = [talk(i) for i in range(12)]
    expected = plain_scores(any_classifier, conversations)
    assert np.ptp(expected) > 0.1
    scores = [verdict.value for verdict in score_all(any_classifier, conversations)]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=CLOSE)


@pytest.mark.grid(1)
@pytest.mark.parametrize("prefix", ["v_head.summary.", "summary.", ""])
def test_a_value_head_next_to_a_causal_model(tiny_models, tmp_path, prefix):
    folder = shutil.copytree(tiny_models["qwen3"], tmp_path / "rm")
    torch.manual_seed(2)
    weight, bias = torch.randn(1, 64), torch.randn(1)
    save_file({f"{prefix}weight": weight, f"{prefix}bias": bias}, folder / "value_head.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    by_hand = []
    for i in range(5):
        tokens = tokenizer.apply_chat_template(talk(i), return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0, -1]
        by_hand.append((weight[0] @ hidden + bias[0]).item())
    scores = [verdict.value for verdict in score_all(folder, [talk(i) for i in range(5)])]
    np.testing.assert_allclose(scores, by_hand, rtol=0, atol=CLOSE)


def test_scores_do_not_depend_on_order_or_batch(classifier):
    model, transcript = load_scalar(settings_of(classifier), CPU), transcript_of(settings_of(classifier))
    sequences = [transcript.tokens(talk(i)) for i in range(30)]
    together = model.score(sequences)
    assert together.dtype == np.float32
    order = np.random.RandomState(0).permutation(len(sequences))
    np.testing.assert_allclose(model.score([sequences[i] for i in order]), together[order], rtol=0, atol=CLOSE)
    for budget in (1, 100, 250):  # one, a few, or several per pass
        np.testing.assert_allclose(model.score(sequences, tokens_per_pass=budget), together, rtol=0, atol=CLOSE)
    assert len(list(model.score_in_passes(sequences))) == 1
    passes = list(model.score_in_passes(sequences, tokens_per_pass=250))
    assert all(sum(len(sequences[i]) for i in indices) <= 250 for indices, _ in passes)
    assert not any(p.requires_grad for p in model.parameters())


def test_equal_conversations_have_bitwise_equal_scores(classifier):
    """Otherwise the scores of equal answers would have a spread."""
    conversations = [talk(i % 7) for i in range(140)]
    values = [verdict.value for verdict in score_all(classifier, conversations)]
    assert len(set(values)) == 7
    assert values == values[:7] * 20


def test_in_bf16_the_residual_stream_stays_in_fp32(any_classifier):
    conversations = [talk(i) for i in range(8)]
    model, transcript = load_scalar(settings_of(any_classifier, dtype="bfloat16"), CPU), transcript_of(settings_of(any_classifier))
    assert has_fp32_residual(model.decoder)
    assert model.head.weight.dtype == torch.float32
    scores = model.score([transcript.tokens(c) for c in conversations])
    expected = np.array(plain_scores(any_classifier, conversations))
    assert np.abs(scores - expected).max() < 0.1 * np.ptp(expected)


def test_conversations_that_are_too_long_are_marked_and_not_scored(classifier):
    transcript = transcript_of(settings_of(classifier))
    lengths = [len(transcript.tokens(talk(i))) for i in range(6)]
    limit = sorted(lengths)[2]
    verdicts = score_all(classifier, [talk(i) for i in range(6)], max_prompt_tokens=limit)
    assert [v.too_long for v in verdicts] == [n > limit for n in lengths]
    assert [v.prompt_tokens for v in verdicts] == lengths
    for verdict in verdicts:
        assert verdict.failure is None
        assert (verdict.value is None) == verdict.too_long
    # The default limit is the model's context.
    (verdict,) = score_all(classifier, [[{"role": "user", "content": "1 " * 3000}, {"role": "assistant", "content": "?"}]])
    assert verdict.too_long


def test_a_template_with_a_bos_gets_no_second_one(classifier, tmp_path):
    folder = shutil.copytree(classifier, tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", BOS_TEMPLATE
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("1")["input_ids"][0] == bos, "the tokenizer adds one by itself"
    tokens = transcript_of(settings_of(folder)).tokens(talk(1))
    assert tokens.count(bos) == 1
    assert tokens[0] == bos
    assert tokens == tokenizer.apply_chat_template(talk(1), return_dict=True)["input_ids"]
    np.testing.assert_allclose([v.value for v in score_all(folder, [talk(1)])], plain_scores(folder, [talk(1)]), rtol=0, atol=CLOSE)


def test_a_scoring_template_needs_no_generation_prompt(classifier, tmp_path):
    template = tmp_path / "read.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}")
    assert score_all(classifier, [talk(1)], chat_template=str(template))[0].value is not None


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_conversation_that_cannot_be_rendered_fails_alone(classifier, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT + BOS_TEMPLATE)
    bad: list[Message] = [{"role": "narrator", "content": "Then"}, {"role": "assistant", "content": "?"}]
    verdicts = score_all(classifier, [talk(1), bad, talk(2)], chat_template=str(template))
    alone = score_all(classifier, [talk(1), talk(2)], chat_template=str(template))
    assert [v.value for v in (verdicts[0], verdicts[2])] == [v.value for v in alone]
    assert "no narrator" in str(verdicts[1].failure)
    assert verdicts[1].failure is not None
    assert verdicts[1].failure.cause == "render"


@pytest.mark.slow
def test_a_conversation_that_breaks_a_pass_fails_alone(classifier, monkeypatch):
    """A pass that raises is bisected; the one conversation that still raises fails with its cause."""
    forward, marked = ScalarModel.forward, transcript_of(settings_of(classifier)).tokens(talk(11))
    culprit = torch.tensor(marked[-40:])

    def breaks(self, batch):
        windows = batch.tokens_T.unfold(0, len(culprit), 1) if batch.num_tokens >= len(culprit) else batch.tokens_T[:0]
        if (windows == culprit).all(-1).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return forward(self, batch)

    expected = [v.value for v in score_all(classifier, [talk(i) for i in range(20)])]
    monkeypatch.setattr(ScalarModel, "forward", breaks)
    verdicts = score_all(classifier, [talk(i) for i in range(20)])
    assert [i for i, v in enumerate(verdicts) if v.failure is not None] == [11]
    assert verdicts[11].failure is not None
    assert verdicts[11].failure.cause == "out_of_memory"
    np.testing.assert_allclose([v.value for i, v in enumerate(verdicts) if i != 11], expected[:11] + expected[12:], atol=CLOSE)


def test_a_model_that_always_fails_is_not_called_forever():
    calls = []

    def compute(items):
        calls.append(len(items))
        raise ValueError("no")
        yield

    results = bisect_failures(range(1000), compute, lambda failure: failure)
    assert {f.cause for f in results} == {"exception"}
    assert len(results) == 1000
    assert len(calls) <= 2 * batch_bisection.MAX_FAILURES


def test_nan_scores_are_failures(classifier, monkeypatch):
    def scores(self, batch):
        return torch.full((len(batch.starts_S1) - 1,), float("nan"))

    monkeypatch.setattr(ScalarModel, "forward", scores)
    (verdict,) = score_all(classifier, [talk(1)])
    assert verdict.failure is not None
    assert verdict.failure.cause == "not_a_number"


# Generative judges ---------------------------------------------------------------------------------------------------


def transformers_greedy(folder: Path, questions: Sequence[GenerationRequest], max_new_tokens: int) -> list[tuple[str, int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = []
    for one in questions:
        inputs = tokenizer.apply_chat_template(one.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[0, inputs["input_ids"].shape[1] :]
        result.append((tokenizer.decode(out, skip_special_tokens=True), len(out)))
    return result


def test_greedy_answers_match_transformers(writer):
    questions = [question(i) for i in range(8)]
    answers = generate_all(writer, questions, SamplingParams(24))
    assert [(a.text, a.new_tokens) for a in answers] == transformers_greedy(writer, questions, 24)
    assert len({a.text for a in answers}) > 4
    assert {a.truncated for a in answers} == {True, False}
    assert all(a.failure is None and a.prompt_tokens > 10 for a in answers)


def test_samples_depend_on_the_key_and_the_seed_only(writer):
    params = SamplingParams(16, temperature=1.0, top_p=0.95, seed=3)

    async def query(model: LocalModel) -> None:
        together = await model.generate([question(i) for i in range(10)], params)
        backwards = await model.generate([question(i) for i in reversed(range(10))], params)
        alone = [(await model.generate([question(i)], params))[0] for i in range(10)]
        apart = await asyncio.gather(*(model.generate([question(i)], params) for i in range(10)))
        texts = [a.text for a in together]
        assert texts == [a.text for a in reversed(backwards)] == [a.text for a in alone] == [a.text for (a,) in apart]
        same = await model.generate([question(0, key="a"), question(0, key="b"), question(0, key="a")], params)
        assert same[0] == same[2] != same[1]
        (other,) = await model.generate([question(0)], SamplingParams(16, temperature=1.0, top_p=0.95, seed=4))
        assert other != together[0]

    with_model(writer, query, scalar=False)


def test_concurrent_requests_with_different_sampling(writer):
    """Each uses its own sampling parameters and limit; compatible ones are batched together."""
    kinds = [
        SamplingParams(5),
        SamplingParams(12),
        SamplingParams(9, temperature=0.7),
        SamplingParams(9, temperature=0.7, seed=1),
        SamplingParams(12, stop=("e",)),
    ]

    async def query(model: LocalModel) -> None:
        alone = [await model.generate([question(i) for i in range(4)], kind) for kind in kinds]
        together = await asyncio.gather(*(model.generate([question(i) for i in range(4)], kind) for kind in kinds))
        assert list(together) == alone
        assert [max(a.new_tokens for a in answers) for answers in alone[:3]] == [5, 12, 9]
        assert all("e" not in (a.text or "") for a in alone[4])
        assert any(a.new_tokens < 12 and not a.truncated for a in alone[4])

    with_model(writer, query, scalar=False)


def test_a_prompt_given_as_text_is_used_verbatim(writer):
    tokenizer = AutoTokenizer.from_pretrained(writer)
    rendered = tokenizer.apply_chat_template(question(5).messages, add_generation_prompt=True, tokenize=False)
    by_messages, by_text = generate_all(writer, [question(5), GenerationRequest([], text=rendered)], SamplingParams(16))
    assert by_text == by_messages


def test_prompts_that_are_too_long_or_empty_fail_alone(writer, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT + BOS_TEMPLATE)
    long = GenerationRequest([{"role": "user", "content": "1 " * 3000}])
    odd = GenerationRequest([{"role": "narrator", "content": "Then"}])
    requests = [question(1), long, GenerationRequest([], text=""), odd, question(2)]
    answers = generate_all(writer, requests, SamplingParams(8), chat_template=str(template))
    assert [(a.too_long, a.failure and a.failure.cause) for a in answers] == [
        (False, None),
        (True, None),
        (False, "empty"),
        (False, "render"),
        (False, None),
    ]
    limits = {"max_prompt_tokens": answers[0].prompt_tokens, "chat_template": str(template)}
    answers = generate_all(writer, [question(1), question(2)], SamplingParams(8), **limits)
    assert [a.too_long for a in answers] == [False, True]
    (answer,) = generate_all(writer, [question(1)], SamplingParams(4000))
    assert answer.failure is not None
    assert "leaves no room for a prompt in a context of 2,048" in answer.failure.message


def test_an_engine_error_fails_only_its_requests(writer, monkeypatch):
    generate = NativeEngine.generate

    def breaks(self, requests, sampling):
        if sampling.temperature == 0.5:
            raise RuntimeError("no luck today")
        return generate(self, requests, sampling)

    monkeypatch.setattr(NativeEngine, "generate", breaks)

    async def query(model: LocalModel) -> None:
        kinds = (SamplingParams(6), SamplingParams(6, temperature=0.5))
        good, bad = await asyncio.gather(*(model.generate([question(i) for i in range(3)], kind) for kind in kinds))
        assert all(a.failure is None for a in good)
        assert {a.failure for a in bad} == {Failure("exception", "RuntimeError: no luck today")}
        assert model.usage.failures == model.usage.faults == {"exception": 3}
        assert model.usage.calls == 6
        assert model.usage.new_tokens == sum(a.new_tokens for a in good)

    with_model(writer, query, scalar=False)


# Concurrency ---------------------------------------------------------------------------------------------------------


def test_many_small_requests_become_few_batches(classifier, writer, monkeypatch):
    """Requests that arrive while the model is busy are batched together."""
    all_submitted = threading.Event()
    generate, forward = NativeEngine.generate, ScalarModel.forward

    def generate_later(self, *given):
        assert all_submitted.wait(100)
        return generate(self, *given)

    def forward_later(self, batch):
        assert all_submitted.wait(100)
        return forward(self, batch)

    monkeypatch.setattr(NativeEngine, "generate", generate_later)
    monkeypatch.setattr(ScalarModel, "forward", forward_later)

    async def together(calls: Iterable[Coroutine[Any, Any, list]]) -> list[list]:
        all_submitted.clear()
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(10):
            await asyncio.sleep(0)
        all_submitted.set()
        return await asyncio.gather(*tasks)

    async def check_scores(model: LocalModel) -> None:
        verdicts = await together(model.score([talk(i)]) for i in range(200))
        together_again = await model.score([talk(i) for i in range(200)])
        assert [v.value for (v,) in verdicts] == pytest.approx([v.value for v in together_again], rel=1e-6, abs=1e-7)
        assert model.batches <= 8

    async def check_answers(model: LocalModel) -> None:
        answers = await together(model.generate([question(i)], SamplingParams(4)) for i in range(200))
        assert all(a.failure is None for (a,) in answers)
        assert model.batches <= 2

    with_model(classifier, check_scores, scalar=True)
    with_model(writer, check_answers, scalar=False)


def test_the_event_loop_is_not_blocked_while_a_model_computes(classifier, monkeypatch):
    """The pass does not end before the loop has moved on."""
    moved_on, forward = threading.Event(), ScalarModel.forward

    def waits(self, batch):
        assert moved_on.wait(200)
        return forward(self, batch)

    monkeypatch.setattr(ScalarModel, "forward", waits)

    async def query(model: LocalModel) -> None:
        pending = asyncio.create_task(model.score([talk(1)]))
        await asyncio.sleep(0.05)
        assert not pending.done()
        moved_on.set()
        assert (await pending)[0].failure is None

    with_model(classifier, query, scalar=True)


def test_cancelled_requests_are_not_computed():
    begun, proceed, seen = threading.Event(), threading.Event(), []

    def compute(items):
        seen.extend(items)
        begun.set()
        assert proceed.wait(200)
        return items

    async def query() -> None:
        thread = ModelThread("test", compute, CPU)
        first = asyncio.create_task(thread.compute(["first"]))
        await asyncio.to_thread(begun.wait)
        second, third = (asyncio.create_task(thread.compute([name])) for name in ("second", "third"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        proceed.set()
        assert (await first, await third) == (["first"], ["third"])
        await thread.close(lambda: None)
        with pytest.raises(Closed):
            await thread.compute(["fourth"])

    run(query())
    assert seen == ["first", "third"]


def test_closing_answers_pending_requests(classifier):
    async def query() -> None:
        model = await opened(classifier, scalar=True)
        pending = [asyncio.create_task(model.score([talk(i)])) for i in range(20)]
        await asyncio.sleep(0)
        await model.close()
        await model.close()
        causes = {v.failure and v.failure.cause for (v,) in await asyncio.gather(*pending)}
        assert causes <= {None, "closed"}
        assert (await model.score([talk(1)]))[0].failure == Failure("closed", "the model has been closed")
        await model.open()
        assert (await model.score([talk(1)]))[0].failure is None
        await model.close()
        await LocalModel(settings_of(classifier), scalar=True).close()  # never opened

    run(query())


# Loading and unloading -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.usefixtures("fast_gc")
def test_loading_and_unloading_leaks_no_memory(tmp_path, rows_file, scalar):
    from plaudit.prepare.tiny_model import make_tiny_model

    make_tiny_model([rows_file], tmp_path / "large", kind="llama", hidden_size=512, layers=3, vocabulary=320)
    folder = make_classifier(tmp_path / "large", tmp_path / "rm") if scalar else tmp_path / "large"
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert size > 20e6

    async def query(model: LocalModel) -> list[Any]:
        return await (model.score([talk(1), talk(2)]) if scalar else model.generate([question(1)], SamplingParams(12)))

    async def go(model: LocalModel) -> None:
        assert RESIDENT_MODELS.models() == []
        assert {a.failure and a.failure.cause for a in await query(model)} == {"not_loaded"}
        answers, memory, survivors = [], [], []
        for _ in range(8):
            await model.load()
            (alive,) = RESIDENT_MODELS.models()
            assert (alive.name, alive.device, alive.offload) == (str(folder), "cpu", True)
            assert alive.bytes == pytest.approx(size, rel=0.01)
            assert RESIDENT_MODELS.bytes("cpu") == alive.bytes
            answers.append(await query(model))
            assert model._weights is not None
            parameters = [weakref.ref(p) for p in model._weights.model.parameters()]
            await model.unload()
            await model.unload()
            assert RESIDENT_MODELS.models() == []
            survivors.append(sum(p() is not None for p in parameters))
            memory.append(psutil.Process().memory_info().rss)
        assert survivors == [0] * 8
        assert all(answer == answers[0] for answer in answers)
        assert all(a.failure is None for a in answers[0])
        # A leak would add the weights in each of five cycles; the allocator may keep something once.
        assert max(memory[3:]) - min(memory[1:3]) < 1.5 * size

    with_model(folder, go, scalar=scalar, placement="offload")
    gc.collect()
    assert RESIDENT_MODELS.models() == []


@pytest.mark.slow
def test_one_offloaded_model_at_a_time(classifier, writer):
    async def go() -> None:
        models = [await opened(folder, scalar=folder == classifier, placement="offload") for folder in (classifier, writer)]
        assert RESIDENT_MODELS.models() == []
        RESIDENT_MODELS.max_offloaded = 0
        for model in models * 2:
            await model.load()
            await model.unload()
        assert RESIDENT_MODELS.max_offloaded == 1
        for model in models:
            await model.load()
        assert RESIDENT_MODELS.max_offloaded == len(RESIDENT_MODELS.models()) == 2
        for model in models:
            await model.close()
        assert RESIDENT_MODELS.models() == []

    run(go())


def test_a_resident_model_is_not_unloaded(classifier):
    async def go(model: LocalModel) -> None:
        (alive,) = RESIDENT_MODELS.models()
        assert not alive.offload
        await model.unload()
        assert RESIDENT_MODELS.models() == [alive]
        await model.load()
        assert (await model.score([talk(1)]))[0].value is not None

    with_model(classifier, go, scalar=True)
    assert RESIDENT_MODELS.models() == []


def test_requests_made_before_unloading_are_answered(classifier):
    async def go(model: LocalModel) -> None:
        await model.load()
        pending = [asyncio.create_task(model.score([talk(i)])) for i in range(10)]
        await asyncio.sleep(0)
        await model.unload()
        assert all(v.failure is None for (v,) in await asyncio.gather(*pending))

    with_model(classifier, go, scalar=True, placement="offload")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_fails_its_requests(classifier, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def go(model: LocalModel) -> None:
        monkeypatch.setattr(scalar_inference, "load_scalar", out_of_memory)
        await model.load()
        (verdict,) = await model.score([talk(1)])
        assert verdict.failure is not None
        assert verdict.failure.cause == "out_of_memory"
        assert "could not be loaded" in verdict.failure.message
        assert RESIDENT_MODELS.models() == []
        monkeypatch.undo()
        await model.load()
        assert (await model.score([talk(1)]))[0].failure is None

    with_model(classifier, go, scalar=True, placement="offload")
    monkeypatch.setattr(scalar_inference, "load_scalar", out_of_memory)
    with pytest.raises(RecipeError, match=r"does not fit into the free part of memory.*placement: offload"):
        score_all(classifier, [])


@pytest.mark.slow
def test_host_copies_restore_a_model(classifier):
    """The round trip of a GPU's weights, here from CPU to CPU."""
    model, transcript = load_scalar(settings_of(classifier), CPU), transcript_of(settings_of(classifier))
    tokens = [transcript.tokens(talk(i)) for i in range(4)]
    before = model.score(tokens)
    copies = HostCopies(model)
    for _ in range(3):
        there = [weakref.ref(p.data.untyped_storage()) for p in model.parameters()]
        copies.to_host()
        gc.collect()
        assert not any(storage() for storage in there)
        copies.to_device(CPU)
    np.testing.assert_array_equal(model.score(tokens), before)


# Invalid folders -----------------------------------------------------------------------------------------------------


def error_for(folder: Path, *, scalar: bool = True, **settings) -> str:
    with pytest.raises(RecipeError) as error:
        with_model(folder, lambda model: model.score([]), scalar=scalar, placement="offload", **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_bad_folders_are_rejected_before_weights_are_read(classifier, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(scalar_inference, "load_scalar", None)
    near = classifier.with_name("rmm")
    assert error_for(near) == f"{near}: no such folder. Did you mean {classifier}?"
    (tmp_path / "empty").mkdir()
    assert "no config.json (found: nothing)" in error_for(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").touch()
    assert "is not peft's description of an adapter" in error_for(tmp_path / "empty")
    assert "is a file" in error_for(classifier / "config.json")

    bare = shutil.copytree(classifier, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert "incomplete weights: model.safetensors missing" in error_for(bare)
    (bare / "pytorch_model.bin").touch()
    assert "its weights are pickled" in error_for(bare)

    silent = shutil.copytree(classifier, tmp_path / "silent")
    (silent / "chat_template.jinja").unlink()
    error = error_for(silent)
    assert "the tokenizer has no chat template" in error
    assert "model.chat_template: chatml" in error
    assert "max_prompt_tokens is 9,999" in error_for(classifier, max_prompt_tokens=9999)


@pytest.mark.slow
def test_wrong_architectures_are_rejected(classifier, tiny_models, tmp_path):
    causal = tiny_models["qwen2"]
    assert "Qwen2ForCausalLM has no score" in error_for(causal)
    assert "value_head.safetensors" in error_for(causal)
    assert "LlamaForSequenceClassification scores and does not generate" in error_for(classifier, scalar=False)
    three = make_classifier(causal, tmp_path / "three", labels=3)
    assert "Qwen2ForSequenceClassification has 3 labels, and a reward model has one" in error_for(three)
    AutoConfig.for_model("t5").save_pretrained(shutil.copytree(causal, tmp_path / "t5"))
    assert "is not a causal language model" in error_for(tmp_path / "t5", scalar=False)


def test_a_value_head_that_does_not_fit_is_rejected(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["llama"], tmp_path / "rm")
    save_file({"v_head.summary.weight": torch.zeros(1, 32), "other": torch.zeros(2)}, folder / "value_head.safetensors")
    with pytest.raises(RecipeError, match=r"v_head.summary.weight \[1, 64\].*found: other \[2\], v_head.summary.weight \[1, 32\]"):
        load_scalar(settings_of(folder), CPU)
    (folder / "value_head.safetensors").rename(folder / "value_head.bin")
    assert "value_head.bin is pickled" in error_for(folder)


def test_weights_without_the_head_are_rejected(classifier, tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["llama"], tmp_path / "rm")
    config = json.loads((classifier / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"weights are missing.*score\.weight"):
        load_scalar(settings_of(folder), CPU)


def test_a_missing_gpu_is_reported():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model = LocalModel(RewardModel(path="x", device="cuda"), scalar=True)
    with pytest.raises(RecipeError, match=r"model\.device is cuda, but torch sees no GPU here"):
        run(model.open())
    run(model.close())
