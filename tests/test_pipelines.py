"""The pipelines of docs/pipelines/rlmt.md and grrm.md: from real rows to trained tiny models, by the commands of the page alone.

What a reader downloads or pays for is made here: base models, the reward model, the strong model behind a URL. Paths, sizes and
learning rates are those of models with two layers.
"""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.fault_server import FaultServer
from support.models import make_classifier
from support.paths import REPOSITORY
from support.pipelines import PipelinePage, metrics_of, share_with_signal
from support.rows import write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory of the commands, with the recipes and an empty folder for raw data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    (tmp_path / "raw").mkdir()
    return tmp_path


def read(path: str | Path) -> list[dict]:
    """The rows of a parquet file, a folder of them, or a JSONL file."""
    if Path(path).suffix == ".jsonl":
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    return pq.read_table(path).to_pylist()


def losses_of(run: str) -> list[float]:
    return [row["loss"] for row in metrics_of(run) if "loss" in row]


# RLMT ----------------------------------------------------------------------------------------------------------------


def wildchat_rows(real_data: Path) -> list[dict]:
    """48 conversations in WildChat's form that begin with real prompts, and three to be left out."""
    prompts = [row["prompt"][0]["content"] for row in read(real_data / "wildchat_if_train.parquet")]
    short = [prompt for prompt in prompts if len(prompt) <= 50 and prompt.isascii()][:48]

    def row(i: int, prompt: str, language: str = "English") -> dict:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "I cannot help."}]
        return {"conversation_hash": f"chat-{i}", "conversation": turns, "language": language}

    others = [row(48, short[0]), row(49, "Wie ist das Wetter heute bei dir?", "German"), row(50, max(prompts, key=len))]
    return [row(i, prompt) for i, prompt in enumerate(short)] + others


class StrongModel(FaultServer):
    """Plans, then repeats the end of the prompt. Of every nine prompts it forgets the form for one at first, and for one always."""

    def __init__(self, prompts: list[str]):
        super().__init__(model="strong", key="secret")
        self.reply = self._reply
        self.prompts, self.answered = prompts, Counter[str]()

    def _reply(self, request: str) -> str:
        prompt = request.partition("\n\nFORMAT:")[0]
        self.answered[prompt] += 1
        number = self.prompts.index(prompt) % 9
        response = f"Here: {' '.join(prompt.split()[-2:])}"
        if number == 8 or (number == 4 and self.answered[prompt] == 1):
            return response
        return f"<think>The plan is to reply to {prompt.split()[0]}.</think>\n<response>{response}</response>"


def answer_in(response: str) -> str:
    return response.partition("</think>")[2].lstrip()


def test_rlmt_from_conversations_to_dpo_and_grpo(folder, real_data, plaudit, monkeypatch):
    from plaudit.prepare.tiny_model import make_tiny_model

    page = PipelinePage("rlmt.md", plaudit)
    raw = write_jsonl(folder / "raw/wildchat.jsonl", wildchat_rows(real_data))
    page.run("prepare conversations allenai", instead={"allenai/WildChat-1M": str(raw), "4000": "50", "250": "8"})
    assert [len(read(f"data/wildchat/{part}.parquet")) for part in ("train", "val")] == [40, 8]

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with StrongModel([row["prompt"][0]["content"] for row in read("data/wildchat/train.parquet")]) as strong:
        page.run("prepare thoughts data", instead={"https://api.openai.com": strong.url, "gpt-4.1-mini": "strong"})
    assert (len(strong.answered), strong.answered.total()) == (40, 40 + 4 + 4)  # another answer to each that lacked the form
    page.run("prepare thoughts-sft data/thoughts.jsonl --out data/sft_think.parquet")
    page.run("prepare thoughts-sft data/thoughts.jsonl --out data/sft_nothink.parquet")
    for name, thinks in (("think", True), ("nothink", False)):
        turns = [row["messages"][-1]["content"] for row in read(f"data/sft_{name}.parquet")]
        assert len(turns) == 40 - 4
        assert all(turn.startswith("<think>\nThe plan is") == thinks and "Here: " in turn for turn in turns)

    make_tiny_model(["data/sft_think.parquet"], "models/base", hidden_size=96)
    make_classifier(folder / "models/base", folder / "models/reward")
    base = ("model.path=models/base", "model.tokenizer=models/base", "data.max_tokens=256")
    page.run("sft recipes/rlmt/sft_llama_think.yaml", *base, "optim.lr=4e-3", "run.epochs=30")
    losses = losses_of("runs/rlmt-sft-llama-think")
    assert losses[-1] < 0.5 < 4 < losses[0]

    # Scores and pairs
    Path("skywork.yaml").write_text(page.files["skywork.yaml"])
    reward = ("rewards.0.model.path=models/reward", "rewards.0.model.max_prompt_tokens=512")
    page.run("sample runs/rlmt-sft-llama-think/model", instead={"4096": "64"})
    page.run("score skywork.yaml", *reward, "rewards.0.model.dtype=float32")
    for row in read("data/scored.jsonl"):
        for response, view, malformed in zip(row["responses"], row["view"], row["malformed"], strict=True):
            assert malformed == ("</think>" not in response["text"])
            assert malformed or view == answer_in(response["text"])
    page.run("prepare pairs")
    pairs = read("data/dpo_think/train.jsonl")
    assert len(pairs) > 30
    assert all("</think>" in pair[side] for pair in pairs for side in ("chosen", "rejected"))
    page.run("dpo recipes/rlmt/dpo_llama_think.yaml", "train.pairs_per_step=16", "optim.lr=3e-4")
    losses = losses_of("runs/rlmt-dpo-llama-think")
    assert losses[-1] < losses[0]

    # GRPO
    sizes = ("rollout.max_new_tokens=64", "train.prompts_per_step=8", "run.max_steps=4")
    page.run("rl recipes/rlmt/grpo_llamabase_warm-start_think.yaml", *reward, *sizes, "optim.lr=1e-4")
    run = "runs/rlmt-grpo-llama-think"
    share = share_with_signal(run)
    samples = read(f"{run}/samples")
    closed = [sample for sample in samples if "</think>" in sample["response"]]
    print(
        f"RLMT: rewards differ in {share:.0%} of the groups; {len(closed) / len(samples):.0%} of the responses end their thoughts"
    )
    assert share > 0.1
    assert len(closed) > 0.8 * len(samples)
    for sample in closed:
        assert sample["view/scalar_model"] == answer_in(sample["response"])
    assert (Path(run) / "model/longcot_config.json").exists()
