"""The pipelines of docs/pipelines/rlmt.md and grrm.md: from real rows to trained tiny models, by the commands of the page alone.

What a reader downloads or pays for is made here: base models, the reward model, the strong model behind a URL. Paths, sizes and
learning rates are those of models with two layers.
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
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
    print(f"RLMT: rewards differ in {share:.0%} of the groups; {len(closed) / len(samples):.0%} of the responses end thoughts")
    assert share > 0.1
    assert len(closed) > 0.8 * len(samples)
    for sample in closed:
        assert sample["view/scalar_model"] == answer_in(sample["response"])
    assert (Path(run) / "model/longcot_config.json").exists()


# GRRM ----------------------------------------------------------------------------------------------------------------

SHORT = ("--max-characters", "112")
"""Five of the real groups, which a tiny judge can memorise."""
JUDGE = "my_judge.jinja"


def write_raw_rows(real_data: Path) -> None:
    """The files of the page's `raw/`. Responses for the policy's SFT: a rater's note, then the translation it is about."""
    for part, end in (("train", ""), ("test", "_test")):
        shutil.copy(real_data / f"mt_ranking_ende_{part}.parquet", f"raw/ranking{end}.parquet")
        texts, demonstrations = [], []
        for group in read(f"raw/ranking{end}.parquet"):
            translations = group["mt_texts"]
            if len(group["src_text"] + "".join(translations)) > int(SHORT[1]):
                continue
            best = translations[group["scores"].index(max(group["scores"]))]
            texts.append({name: group[name] for name in ("src_text", "src_lang", "trg_lang")} | {"trg_text": best})
            notes = [line.partition(": ")[2] for line in group["analysis"].splitlines()]
            for note, translation in zip(notes, translations, strict=True):
                demonstrations.append(texts[-1] | {"response": f"{note}\n```\n{translation}\n```"})
        pq.write_table(pa.Table.from_pylist(texts), f"raw/texts{end}.parquet")
        pq.write_table(pa.Table.from_pylist(demonstrations), f"raw/cot{end}.parquet")


def test_grrm_from_scored_groups_to_a_policy_judged_by_the_trained_model(folder, real_data, plaudit):
    from plaudit.prepare.tiny_model import make_tiny_model

    page = PipelinePage("grrm.md", plaudit)
    write_raw_rows(real_data)
    template = re.search(rf'^````jinja title="{JUDGE}"\n(.*?)^````$', page.page.read_text(encoding="utf-8"), re.M | re.S)
    assert template, f"{page.page} has no {JUDGE}"
    Path(JUDGE).write_text(template[1])

    # The judge
    page.run("prepare ranking-sft", *SHORT, "--template", JUDGE, "--subgroup-augment", "4", "--shuffle-augment", "4")
    page.run("prepare ranking-rl raw/ranking.parquet", *SHORT, "--template", JUDGE)
    page.run("prepare ranking-rl raw/ranking_test.parquet", "--template", JUDGE)
    sizes = {group["src_text"]: len(group["mt_texts"]) for group in read("raw/ranking.parquet")}
    rows = Counter(row["extra_info"]["src_text"] for row in read("data/rl_towerblocks_mt_ranking.parquet"))
    assert Counter(sizes[text] for text in rows) == {3: 2, 4: 3}
    assert all(count == 11 if sizes[text] == 3 else 13 <= count <= 25 for text, count in rows.items())
    assert len(read("data/rl_towerblocks_mt_ranking.test.parquet")) == len(read("raw/ranking_test.parquet"))

    make_tiny_model(["data/sft_towerblocks_mt_ranking.parquet"], "models/judge_base", vocabulary=800)
    sft = ("data.max_tokens=1024", "train.rows_per_step=16", "optim.lr=3e-3", "run.epochs=100")
    page.run("sft recipes/grrm/sft.yaml", "model.path=models/judge_base", *sft, "run.max_steps=180")
    assert losses_of("runs/grrm-sft")[-1] < 0.2
    rl = ("data.max_prompt_tokens=256", "train.prompts_per_update=4", "validation.max_prompts=2", "optim.lr=1e-4")
    page.run("rl recipes/grrm/rlvr.yaml", *rl, "rollout.max_new_tokens=128", "train.prompts_per_step=8", "run.max_steps=3")
    judge_share = share_with_signal("runs/grrm-rlvr")

    # The policy
    page.run("prepare translation-sft")
    page.run("prepare translation-rl raw/texts.parquet --out data/rl_towerblocks_mt.parquet")
    page.run("prepare translation-rl raw/texts.parquet --out data/rl_towerblocks_mt_cla.parquet")
    page.run("prepare translation-rl raw/texts_test.parquet")
    assert [len(read(f"data/rl_towerblocks_mt{end}.parquet")) for end in ("", "_cla")] == [5, 10]
    make_tiny_model(["data/sft_towerblocks_mt_cot.parquet"], "models/policy_base", vocabulary=800)
    page.run("sft recipes/grrm/policy_sft.yaml", "model.path=models/policy_base", *sft, "run.max_steps=100")
    judge = (
        f"rewards.0.template={JUDGE}",
        "rewards.0.model.max_prompt_tokens=256",
        "rewards.0.sampling.max_new_tokens=128",
        "rewards.0.max_failure_rate=0.5",  # a tiny judge is not always readable; such groups are dropped
        "rewards.1.max_tokens=64",
        "rewards.1.buffer_tokens=32",
    )
    steps = ("rollout.max_new_tokens=64", "train.prompts_per_step=4", "run.epochs=4", "run.max_steps=4")
    page.run("rl recipes/grrm/policy_grpo.yaml", *rl, *judge, *steps)
    policy_share = share_with_signal("runs/grrm-policy-grpo")
    print(f"GRRM: rewards differ in {judge_share:.0%} of the judge's groups, and in {policy_share:.0%} of the policy's")
    assert judge_share > 0.1
    assert policy_share > 0.1

    # What the judge saw and said
    samples = read("runs/grrm-policy-grpo/samples")
    assert all(sample["reward"] == -0.04 for sample in samples if sample["malformed"])
    judged = [sample for sample in samples if sample["part/group_judge/judged"]]
    assert len(judged) > len(samples) / 2
    for sample in judged:
        trace, view = json.loads(sample["trace/group_judge"]), sample["view/group_judge"]
        _, block, end = sample["response"].split("```")
        assert (view, end) == (block.strip(), "")
        [letter] = re.findall(rf"^Translation ([A-D]):\n```\n{re.escape(view)}\n```$", trace["prompt"], re.M)
        [score] = re.findall(rf"\b{letter}: (\d+)", trace["answer"].splitlines()[-1])
        assert sample["part/group_judge"] == pytest.approx(int(score) / 100)
