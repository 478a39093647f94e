"""Against a real vLLM on the CPU (its own environment: make .venv-vllm/installed).

A judge trained on fixed answers and a reward model trained by `plaudit reward-model` give the same results behind a URL, and in a
server that a recipe starts, as in this process. Servers that are started are gone afterwards (after `kill -9` of plaudit too: see
tests/loops/test_rl_vllm.py).
"""

import asyncio
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from plaudit.data.rollouts import parse_group
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.launch import LaunchedModel
from plaudit.reward_models.server_client import ServerClient
from plaudit.rewards.judges.model_rewards import LiveModelReward
from plaudit.rewards.reward import build
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import Scorer, result_of
from plaudit.servers.process import ServerProcess, free_port
from support.paths import REPOSITORY
from support.processes import gone
from support.recipes import pair_recipe, sft_recipe, train_reward_model, train_sft, write_recipe
from support.rows import write_jsonl
from support.vllm import ARGUMENTS as FAST_START
from support.vllm import ENVIRONMENT, PYTHON, needs_vllm

ARGUMENTS = [*FAST_START, "--max-model-len 256"]
LONG = "1 + " * 300
KEY = "a-key-that-nobody-may-read"
pytestmark = [pytest.mark.slow, needs_vllm]


# Models --------------------------------------------------------------------------------------------------------------

SUMS = [(1, 2), (4, 4), (3, 9), (5, 6), (2, 8)]
ROWS = [{"prompt": f"What is {a} + {b}?", "responses": [str(a + b + off) for off in (0, 1, 3, 7)]} for a, b in SUMS]
ODD_TEXTS = ["", " 3 ", "<|im_end|>\n<|im_start|>assistant", "é😀 漢字", "\n\n", "\x00{{ 3 }}"]
ODD = [{"prompt": "What is 1 + 2?", "responses": ODD_TEXTS}]
GRADE = "Grade.\n{{ task }}\n{{ response }}"
RANK = "Rank.\n{{ task }}\n{% for one in candidates %}[{{ one.letter }}] {{ one.text }}\n{% endfor %}"


def worth(task: str, response: str) -> int:
    first, second = map(int, re.findall(r"\d+", task))
    return 10 - abs(int(response) - first - second)


class Teacher(Backend):
    """Answers as the judge should, and records the conversations as training examples."""

    def __init__(self):
        self.usage, self.examples = Usage(), []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, conversations) -> list[ScalarScore]:
        raise NotImplementedError

    async def generate(self, questions: Sequence[GenerationRequest], writing: SamplingParams) -> list[Answer]:
        return [Answer(self._reply(question)) for question in questions]

    def _reply(self, question: GenerationRequest) -> str:
        kind, task, *rest = question.messages[-1]["content"].strip().split("\n")
        if kind == "Grade.":
            reply = f"It is worth\n{worth(task, rest[0])}"
        else:
            scores = {line[1]: worth(task, line[4:]) for line in rest}
            order = sorted(scores, key=lambda letter: -scores[letter])
            reply = f"Ranking:\n{' > '.join(order)}\nScores:\n" + ", ".join(f"{letter}: {scores[letter]}" for letter in order)
        self.examples.append({"messages": [*question.messages, {"role": "assistant", "content": reply}]})
        return reply


@dataclass(frozen=True)
class Models:
    judge: Path
    scalar: Path
    """A reward model as `plaudit reward-model` saves it, with its adapter merged."""
    expected: list[dict]
    """The teacher's results for ROWS."""
    rewards: Callable[..., list[dict]]
    """The settings of the judges, from those of their model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory, pairs_file) -> Models:
    """With heads of 32, the smallest that vLLM's attention on the CPU supports."""
    from plaudit.prepare.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("models")
    (folder / "grade.jinja").write_text(GRADE)
    (folder / "rank.jinja").write_text(RANK)

    def rewards(**model) -> list[dict]:
        common = {"model": model, "sampling": {"max_new_tokens": 64}, "limits": {"unreadable_retries": 0}}
        return [
            {"kind": "judge", "template": str(folder / "grade.jinja"), **common},
            {"kind": "group_judge", "template": str(folder / "rank.jinja"), "weight": 0.1, **common},
        ]

    teacher = Teacher()
    teacher_rewards = [build(reward) for reward in ScoreRecipe.model_validate({"rewards": rewards(path="nowhere")}).rewards]
    for live in teacher_rewards:
        assert isinstance(live, LiveModelReward)
        live.use(teacher)
    with RewardRunner(teacher_rewards, tolerant=True) as runner:
        groups = [parse_group(row, str(i), f"row {i}") for i, row in enumerate(ROWS)]
        expected = [result_of(one, many=True) for one in runner.collect(groups)]
    examples = write_jsonl(folder / "examples.jsonl", teacher.examples)
    make_tiny_model([examples], folder / "random", kind="llama", hidden_size=128, layers=2, vocabulary=320)
    recipe = sft_recipe(
        folder / "random", examples, folder / "run",
        train={"rows_per_step": len(teacher.examples), "tokens_per_micro_batch": 4096},
        optim={"lr": 3e-3, "warmup_steps": 5},
        run={"max_steps": 150, "epochs": 1000},
    )  # fmt: skip
    judge = train_sft(write_recipe(folder / "sft.yaml", recipe))
    recipe = pair_recipe(
        judge, pairs_file, folder / "reward-model",
        model={"dtype": "float32", "lora": {"rank": 4}},
        run={"max_steps": 60, "epochs": 100},  # until scores are so large that a sigmoid would show
    )  # fmt: skip
    scalar = train_reward_model(write_recipe(folder / "reward-model.yaml", recipe))
    return Models(judge, scalar, expected, rewards)


# Servers -------------------------------------------------------------------------------------------------------------


@contextmanager
def served(path: Path, log: Path, *, scalar: bool) -> Iterator[str]:
    """The URL of a server that was started independently."""
    model = RewardModel(path=str(path), placement="launch", program=str(PYTHON), arguments=tuple(ARGUMENTS))
    launched = LaunchedModel(model, scalar=scalar)
    launched.port = free_port()
    server = ServerProcess(launched.command, log, {**os.environ, **ENVIRONMENT})
    try:
        url = f"http://127.0.0.1:{launched.port}"
        wait_for(lambda: is_healthy(url) or not server.alive, "a server")
        assert server.alive, log.read_text()[-3000:]
        yield url
    finally:
        server.stop()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def wait_for(happened: Callable[[], object], what: str, within_s: float = 900.0) -> None:
    """Starting takes vLLM a minute of a core, and some more the first time."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"no {what} within {within_s:g} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def judge_url(models, tmp_path_factory) -> Iterator[str]:
    with served(models.judge, tmp_path_factory.mktemp("judge") / "server.log", scalar=False) as url:
        yield url


@pytest.fixture(scope="module")
def scalar_url(models, tmp_path_factory) -> Iterator[str]:
    with served(models.scalar, tmp_path_factory.mktemp("scalar") / "server.log", scalar=True) as url:
        yield url


def with_client(use, url: str, *, scalar: bool):
    async def run():
        client = ServerClient(RewardModel(placement="server", url=(url,)), scalar=scalar)
        await client.open()
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


# A model behind a URL ------------------------------------------------------------------------------------------------


def conversation(answer: str) -> list[dict]:
    return [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": answer}]


def test_scalar_scores_match_transformers(models, scalar_url):
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    scorer = LlamaForSequenceClassification.from_pretrained(models.scalar, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(models.scalar)
    conversations = [conversation(answer) for answer in ("3", "4", "three, I think")]
    expected = []
    for one in conversations:
        ids = tokenizer.apply_chat_template(one, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            expected.append(scorer(ids).logits.item())

    async def query(client: ServerClient) -> tuple[list[ScalarScore], list[ScalarScore]]:
        rendered_here = await client.score([*conversations, conversation(LONG)])
        client._template = None  # as if its tokenizer were unavailable
        return rendered_here, await client.score([*conversations, conversation(LONG)])

    for verdicts in with_client(query, scalar_url, scalar=True):
        assert [verdict.value for verdict in verdicts[:3]] == pytest.approx(expected, abs=1e-4)
        assert (verdicts[3].too_long, verdicts[3].failure) == (True, None)
    assert max(map(abs, expected)) > 1.0


def test_judge_answers_match_transformers(models, judge_url):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.judge)
    policy = AutoModelForCausalLM.from_pretrained(models.judge, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "Grade.\nWhat is 3 + 3?\n5"}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # pyright: ignore
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    written = policy.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(written, skip_special_tokens=True)

    async def query(client: ServerClient) -> tuple[list[Answer], list[Answer]]:
        long = GenerationRequest([{"role": "user", "content": LONG}])
        greedy = await client.generate([GenerationRequest(messages), GenerationRequest([], text=text), long], SamplingParams(32))
        drawn = [
            await client.generate([GenerationRequest(messages, key=key)], SamplingParams(32, temperature=2.0)) for key in "xxyz"
        ]
        return greedy, [answer for [answer] in drawn]

    greedy, drawn = with_client(query, judge_url, scalar=False)
    assert [answer.text for answer in greedy] == [expected, expected, None]
    assert greedy[0].prompt_tokens == greedy[1].prompt_tokens == ids.shape[1]  # no second BOS token
    assert [answer.too_long for answer in greedy] == [False, False, True]
    assert drawn[0].text == drawn[1].text
    assert len({answer.text for answer in drawn} - {None}) > 1


# The same recipe with models in different places ---------------------------------------------------------------------


def scored(rewards: list[dict], rows: list[dict] = ROWS) -> tuple[list[dict], list[tuple[int, int, int]]]:
    """The results for the rows, and the usage of each model: calls, prompt tokens, new tokens."""
    with Scorer(rewards) as scorer:
        results = scorer.score(rows)
        usages = [live.backend.usage for live in scorer.runner.live if isinstance(live, LiveModelReward)]
        return results, [(usage.calls, usage.prompt_tokens, usage.new_tokens) for usage in usages]


def assert_same_values(found: list[dict], expected: list[dict]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["failure"] == other["failure"] == [None] * len(one["reward"])
        assert one["reward"] == pytest.approx(other["reward"], abs=1e-4)
        for parts, others in zip(one["parts"], other["parts"], strict=True):
            assert parts == pytest.approx(others, abs=1e-4)


def test_judges_agree_behind_a_url_and_in_this_process(models, judge_url):
    in_this_process = {"path": str(models.judge), "dtype": "float32", "device": "cpu"}
    here, usage_here = scored(models.rewards(**in_this_process))
    assert_same_values(here, models.expected)  # it reproduces its training examples, so there is something to compare
    assert [calls for calls, _, _ in usage_here] == [4 * len(ROWS), len(ROWS)]
    other_name = judge_url.replace("127.0.0.1", "localhost")
    for model in (
        {"url": judge_url},
        {"url": [judge_url, f"{other_name}/v1"], "path": str(models.judge)},
        {"url": judge_url, "tokenizer": str(models.judge)},  # rendered here, sent as tokens
    ):
        there, usage_there = scored(models.rewards(placement="server", **model))
        assert_same_values(there, here)
        assert usage_there == usage_here
    [[calls, read, _]] = scored(models.rewards(**in_this_process)[:1], ODD)[1]
    rendered_here = models.rewards(placement="server", url=judge_url, tokenizer=str(models.judge))[:1]
    [[calls_there, read_there, _]] = scored(rendered_here, ODD)[1]
    assert (calls_there, read_there) == (calls, read)
    [[_, read_there, _]] = scored(models.rewards(placement="server", url=judge_url)[:1], ODD)[1]
    assert read_there < read, "a server that renders messages itself reads control tokens in a response as its own"


def test_samples_agree_behind_a_url_and_in_this_process(models, judge_url, tmp_path, plaudit):
    """The most likely tokens after a prefill, up to a stop string, which is part of a response in both."""
    questions = [{"prompt": f"Grade.\n{row['prompt']}\n{row['responses'][0]}"} for row in ROWS]
    file = write_jsonl(tmp_path / "questions.jsonl", questions)
    options = ("--temperature", 0, "--prefill", "It", "--stop", "worth", "--max-new-tokens", 32)
    responses = []
    for name, where in {"here": ("--device", "cpu"), "there": ("--url", judge_url)}.items():
        code, _, err = plaudit("sample", models.judge, file, "--out", tmp_path / f"{name}.jsonl", *options, *where)
        assert code == 0, err
        rows = {row["id"]: row for row in map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())}
        responses.append([(row["responses"], row["status"], row["tokens"]) for _, row in sorted(rows.items())])
    here, there = responses
    assert here == there
    assert [texts for texts, _, _ in here] == [["It is worth"]] * len(ROWS)


def test_scalar_models_agree_behind_a_url_and_in_this_process(models, scalar_url):
    def reward(**model) -> list[dict]:
        return [{"kind": "scalar_model", "model": model}]

    here, usage_here = scored(reward(path=str(models.scalar), dtype="float32", device="cpu"), ROWS + ODD)
    there, usage_there = scored(reward(placement="server", url=scalar_url), ROWS + ODD)
    assert_same_values(there, here)
    assert usage_there == usage_here
    values = [value for one in here for value in one["reward"]]
    assert max(values) - min(values) > 0.1


def test_embeddings_agree_in_a_launched_server_and_in_this_process(pairs_file, tmp_path, monkeypatch):
    from plaudit.prepare.tiny_model import make_tiny_model

    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs plaudit[similarity]")
    make_tiny_model([pairs_file], tmp_path / "random", kind="llama", hidden_size=128, layers=2, vocabulary=320)
    (tmp_path / "random/chat_template.jinja").unlink()  # sentence-transformers would apply it, and servers do not
    sentence_transformers.SentenceTransformer(str(tmp_path / "random"), device="cpu").save(str(tmp_path / "embedder"))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    row = {"prompt": "p", "responses": ["four", "It is 4.", "no", LONG, ""], "ground_truth": ["four", "the number 4"]}
    launch = {"placement": "launch", "program": str(PYTHON), "arguments": ARGUMENTS}
    results = []
    for model in ({"device": "cpu", "max_prompt_tokens": 256}, launch):
        with Scorer([{"kind": "similarity", "model": {"path": str(tmp_path / "embedder"), **model}}]) as scorer:
            results += scorer.score([row])
    here, there = results
    assert there["reward"] == pytest.approx(here["reward"], abs=1e-5)
    assert there["malformed"] == here["malformed"] == [False, False, False, True, True]
    assert len(set(here["reward"][:3])) == 3, "it tells texts apart"


# A server that a recipe starts ---------------------------------------------------------------------------------------

ROUNDS = 32


@dataclass
class Scoring:
    """`plaudit score` of a recipe that starts a server."""

    process: subprocess.Popen
    out: Path
    log: Path
    port: int

    @property
    def saved_scores(self) -> int:
        """The number of scores saved so far."""
        file = self.out.with_name(f"{self.out.name}.scores.sqlite")
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
                return database.execute("select count(*) from scores").fetchone()[0]
        except sqlite3.Error:
            return 0

    def wait_until_scoring(self) -> None:
        wait_for(lambda: self.saved_scores >= 8 or self.process.poll() is not None, "scores")
        assert self.process.poll() is None, self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def scoring(models, tmp_path) -> Iterator[Scoring]:
    port = free_port()
    model = {"path": str(models.judge), "placement": "launch", "program": str(PYTHON), "port": port, "arguments": ARGUMENTS}
    [reward, _] = models.rewards(**model)
    recipe = write_recipe(tmp_path / "rewards.yaml", {"rewards": [{**reward, "limits": {"max_concurrent_groups": 2}}]})
    # Repeated rows, so that scoring takes a while; made distinct, or the cache would answer.
    rows = write_jsonl(tmp_path / "rows.jsonl", [{**row, "extra_info": {"round": i}} for i in range(ROUNDS) for row in ROWS])
    command = [sys.executable, "-m", "plaudit", "score", recipe, rows, "--out", tmp_path / "scored.jsonl"]
    log = tmp_path / "log"
    search = os.pathsep.join(filter(None, (ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": search, "VLLM_API_KEY": KEY}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=REPOSITORY)
    yield Scoring(process, tmp_path / "scored.jsonl", log, port)
    process.terminate()
    process.wait()


def test_a_server_that_dies_is_restarted_and_finally_stopped(models, scoring):
    scoring.wait_until_scoring()
    before = scoring.descendants()
    # What the OOM killer would kill: the child that holds the weights.
    [engine] = [process for process in before if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())]
    engine.kill()
    wait_for(lambda: not is_healthy(f"http://127.0.0.1:{scoring.port}"), "end of the server")
    wait_for(lambda: is_healthy(f"http://127.0.0.1:{scoring.port}"), "second server")
    after = scoring.descendants()
    assert scoring.process.wait(900) == 0, scoring.log.read_text()
    output = " ".join(scoring.log.read_text().split())
    assert "starting it again" in output
    assert KEY not in output
    lines = [json.loads(line) for line in scoring.out.read_text().splitlines()]
    assert len(lines) == ROUNDS * len(ROWS)
    for i, line in enumerate(lines):
        assert line["failure"] == [None] * 4
        assert line["reward"] == [parts["judge"] for parts in models.expected[i % len(ROWS)]["parts"]]
    assert gone(*(process.pid for process in (*before, *after)))
    assert port_is_free(scoring.port)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_sleeps_takes_requests_from_us_only(models, tmp_path):
    """On a CPU vLLM refuses to start in sleep mode; without it, it sleeps and wakes without effect. The routes are the same."""
    arguments = (*ARGUMENTS, "--no-enable-sleep-mode")
    model = RewardModel(path=str(models.judge), placement="launch", program=str(PYTHON), arguments=arguments, sleep=True)
    server = LaunchedModel(model, environment=ENVIRONMENT, log=tmp_path / "server.log")
    question = [GenerationRequest([{"role": "user", "content": "Grade.\nWhat is 3 + 3?\n5"}])]

    def status(path: str, body: bytes | None = None) -> int:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", body).status
        except urllib.error.HTTPError as refused:
            return refused.code

    async def use() -> None:
        try:
            await server.open()
            [before] = await server.generate(question, SamplingParams(32))
            assert [await asyncio.to_thread(status, path) for path in ("/health", "/v1/models", "/is_sleeping")] == [200, 401, 401]
            assert [await asyncio.to_thread(status, path, b"{}") for path in ("/sleep?level=1", "/wake_up")] == [401, 401]
            await server.unload()
            assert (server._asleep, server._lost) == (True, None)
            [after] = await server.generate(question, SamplingParams(32))
            assert after.text == before.text is not None
            assert server._client is not None
            assert await server._client.responds(60.0)
        finally:
            await server.close()

    asyncio.run(use())
    assert "wake up the engine" in (tmp_path / "server.log").read_text()
