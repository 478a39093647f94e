"""Against a real vLLM on the CPU (its own environment: make .venv-vllm/installed): the same numbers and texts as transformers."""

import asyncio
import os
from pathlib import Path

import pytest
from conftest import REPOSITORY

from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Question, Verdict, Writing
from plaudit.reward_models.client import Client
from plaudit.reward_models.connection import Limits
from plaudit.reward_models.launch import Launched

PYTHON = Path(os.environ.get("PLAUDIT_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
}  # fmt: skip
ARGUMENTS = ["--enforce-eager", "--dtype float32", "--max-model-len 128", "--distributed-executor-backend uni"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"needs vLLM in {PYTHON} (or set PLAUDIT_VLLM_PYTHON)"),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, rows_file) -> Path:
    """With heads of 32: vLLM's attention on the CPU takes no smaller ones."""
    from plaudit.prepare.tiny_model import make_tiny_model

    path = tmp_path_factory.mktemp("models") / "llama"
    make_tiny_model([rows_file], path, kind="llama", hidden_size=128, layers=2, vocabulary=320)
    return path


def launched(path: Path, *, scalar: bool, log: Path) -> Launched:
    settings = RewardModel(path=str(path), placement="launch", arguments=tuple(ARGUMENTS), start_timeout_s=400.0)
    program = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    return Launched(settings, scalar=scalar, program=program, environment=ENVIRONMENT, log=log, limits=Limits(backoff_s=0.05))


def conversation(answer: str) -> list[dict]:
    return [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": answer}]


def test_a_scalar_model_gives_the_numbers_that_transformers_gives(tiny_model, tmp_path):
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config.pad_token_id = tokenizer.pad_token_id
    scorer = LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(scorer.score.weight, std=2.0)  # numbers that a sigmoid would show
    scorer.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    conversations = [conversation(answer) for answer in ("3", "4", "three, I think")]
    expected = []
    for one in conversations:
        ids = tokenizer.apply_chat_template(one, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            expected.append(scorer(ids).logits.item())

    async def run() -> tuple[list[Verdict], list[Verdict]]:
        server = launched(tmp_path / "rm", scalar=True, log=tmp_path / "server.log")
        try:
            await server.open()
            rendered_here = await server.judge([*conversations, conversation("3 " * 200)])
            # The same server under a name that leads to no tokenizer: it renders.
            url = f"http://127.0.0.1:{server.port}"
            client = Client(RewardModel(placement="server", url=(url,)), scalar=True)
            await client.open()
            client._template = None
            rendered_there = await client.judge([*conversations, conversation("3 " * 200)])
            await client.close()
            return rendered_here, rendered_there
        finally:
            await server.close()

    for verdicts in asyncio.run(run()):
        assert [verdict.value for verdict in verdicts[:3]] == pytest.approx(expected, abs=1e-4)
        assert (verdicts[3].too_long, verdicts[3].failure) == (True, None)
    assert max(map(abs, expected)) > 1.0


def test_a_judge_writes_what_transformers_writes(tiny_model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # pyright: ignore
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    written = policy.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    # A random model writes halves of characters, and vLLM leaves out one at the end.
    expected = tokenizer.decode(written, skip_special_tokens=True).rstrip("\ufffd")

    async def run() -> tuple[list[Answer], list[Answer]]:
        server = launched(tiny_model, scalar=False, log=tmp_path / "server.log")
        try:
            await server.open()
            long = Question([{"role": "user", "content": "1 + " * 200}])
            greedy = await server.write([Question(messages), Question([], text=text), long], Writing(8))
            drawn = [await server.write([Question(messages, key=key)], Writing(8, temperature=1.0)) for key in "xxy"]
            return greedy, [answer for [answer] in drawn]
        finally:
            await server.close()

    greedy, drawn = asyncio.run(run())
    assert [answer.text for answer in greedy] == [expected, expected, None]
    assert greedy[0].prompt_tokens == greedy[1].prompt_tokens == ids.shape[1]  # no second BOS token
    assert [answer.too_long for answer in greedy] == [False, False, True]
    assert drawn[0].text == drawn[1].text != drawn[2].text
