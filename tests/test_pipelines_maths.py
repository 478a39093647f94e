"""TinyV, the rubric reward model and several reward models: from raw rows to trained tiny models by the commands of their pages.

Overrides are for paths, sizes and devices, and for learning rates that suit tiny models. A policy is cold-started with
demonstrations of which some are careless, so that its rewards differ.
"""

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pytest
from pyarrow import parquet

from plaudit.data.rows import read_rows
from plaudit.prepare.maths import INSTRUCTION
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.templates import JudgeTemplate
from plaudit.types import Prompt
from support.paths import REPOSITORY
from support.pipelines import PipelinePage, share_with_signal
from support.rows import write_jsonl
from support.servers import similarity_service

pytestmark = pytest.mark.slow
SMALL_SFT = ("data.max_tokens=1024", "train.rows_per_step=16", "optim.lr=3e-3", "run.save_every=1000")
SMALL_RL = (
    "data.max_prompt_tokens=1024", "rollout.n=4", "train.prompts_per_step=8", "train.tokens_per_micro_batch=4096", "optim.lr=1e-4",
    "run.max_steps=2",
)  # fmt: skip
SMALL_PPO = (*SMALL_RL, "critic.gradient_checkpointing=false", "critic.optim.lr=1e-3", "validation.max_prompts=4")


@pytest.fixture
def page(plaudit, tmp_path, monkeypatch) -> Iterator[Callable[[str], PipelinePage]]:
    """A page whose commands are run in an empty folder with the recipes. Afterwards it prints the share of groups with a signal."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(REPOSITORY / "recipes")
    Path("raw").mkdir()
    yield lambda name: PipelinePage(name, plaudit)
    for samples in Path("runs").glob("*/samples"):
        print(f"{samples.parent}: {share_with_signal(str(samples.parent)):.0%} of the groups have a signal")


def test_every_command_that_a_page_says_is_run_here_is_named_here():
    source = Path(__file__).read_text()
    for name in ("tinyv", "rubric", "several_rms"):
        text = (REPOSITORY / f"docs/pipelines/{name}.md").read_text()
        blocks = re.findall(r"^<!-- run by tests/test_pipelines_maths\.py -->\n```sh\n(.*?)^```$", text, re.M | re.S)
        commands = re.findall(r"^plaudit (prepare tiny-model|\S+ \S+\.yaml|prepare \S+ \S+)", "\n".join(blocks), re.M)
        assert len(commands) >= 5
        assert [command for command in commands if f'"{command}"' not in source] == []


def conversation(question: str, answer: str, system: str | None = None) -> dict:
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def judge_prompt(template: Path, row: dict, response: str) -> str:
    prompt = Prompt("row", [{"role": "user", "content": row["problem"]}], "", row["answer"], {"criteria": row.get("criteria")})
    return JudgeTemplate(template, Judge.variables, "test").render(prompt, {"response": response})


def samples_of(run: str, before: str) -> list[dict]:
    """All samples of an RL run, which must have changed the model `before`, with a signal in more than a tenth of the groups."""
    from safetensors.torch import load_file

    old, new = (load_file(Path(folder, "model.safetensors")) for folder in (before, f"{run}/model"))
    assert any(not old[name].equal(new[name]) for name in old)
    assert share_with_signal(run) > 0.1
    return [sample for file in sorted(Path(run, "samples").glob("train_*.parquet")) for sample in read_rows(file)]


# TinyV ---------------------------------------------------------------------------------------------------------------

SENTENCE = {"$SENTENCE": INSTRUCTION}
THEIRS = " Let's think step by step and output the final answer within \\boxed{}."


def short_problems(file: Path, count: int) -> list[dict]:
    """Real problems as they were before TinyV's script: short ones, with numbers as answers."""
    found = {
        row["reward_model"]["ground_truth"]: row["extra_info"]["question"].removesuffix(THEIRS)
        for row in read_rows(file)
        if len(row["extra_info"]["question"]) < 160 and re.fullmatch(r"-?[\d./]+(\\%|°)?", row["reward_model"]["ground_truth"])
    }
    return [{"problem": problem, "answer": answer} for answer, problem in list(found.items())[:count]]


def test_tinyv(page, real_data):
    """The policy is rewarded for answers that the rule rejects and the verifier, trained just before, accepts."""
    problems = short_problems(real_data / "bigmath_tinyv.parquet", 8)
    parquet.write_table(pa.Table.from_pylist(problems), "raw/bigmath.parquet")
    write_jsonl(Path("raw/hardverify.jsonl"), problems[:4])
    write_jsonl(Path("raw/benchmarks.jsonl"), problems[4:])
    solutions, labelled = [], []
    for row in problems:
        for value, verdict in ((row["answer"], True), ("0", False)):
            for answer in (value, rf"\text{{it is {value}}}"):  # the rule does not read the second form
                solutions.append(conversation(f"{row['problem']} {INSTRUCTION}", rf"So: \boxed{{{answer}}}"))
                labelled.append(row | {"response": answer, "label": verdict})
    write_jsonl(Path("raw/solutions.jsonl"), solutions)
    write_jsonl(Path("raw/labelled.jsonl"), labelled)

    commands = page("tinyv.md")
    assert f"SENTENCE='{INSTRUCTION}'" in commands.page.read_text()
    assert "32 rows of 32 answers, 16 of them right" in commands.run("prepare verifier-sft raw/labelled.jsonl")
    commands.run("prepare tiny-model")
    commands.run("sft recipes/chain/sft.yaml")
    made = commands.run("prepare math-rl raw/bigmath.parquet", instead=SENTENCE)
    assert "8 rows" in made
    commands.run("prepare math-rl raw/hardverify.jsonl", instead=SENTENCE)
    commands.run("prepare math-rl raw/benchmarks.jsonl", instead=SENTENCE)
    commands.run("sft recipes/tinyv/verifier_sft.yaml", *SMALL_SFT, "model.path=models/tiny", "run.epochs=25")
    commands.run(
        "rl recipes/tinyv/grpo_addon.yaml", *SMALL_RL, "model.path=runs/tiny/model", "rollout.max_new_tokens=48",
        "train.prompts_per_update=4", "rewards.0.judge.model.placement=resident", "rewards.0.judge.model.arguments=[]",
    )  # fmt: skip
    samples = samples_of("runs/tinyv-grpo-addon", before="runs/tiny/model")
    rejected = [sample for sample in samples if sample["part/cascade/rule"] == 0.0 and not sample["malformed"]]
    assert {sample["part/cascade/judge"] for sample in rejected} >= {0.0, 1.0}
    assert all(sample["reward"] == sample["part/cascade/judge"] for sample in rejected)
    passed = [sample for sample in samples if sample["part/cascade/rule"] == 1.0]
    assert {(sample["reward"], sample["part/cascade/judge"]) for sample in passed} == {(1.0, None)}, "the verifier is not called"


# Rubric reward model -------------------------------------------------------------------------------------------------

CRITERIA = "5 points if the sum is written out, 5 points if the right result is in a box."


def test_rubric(page):
    """The reward model is trained on graded solutions, by SFT and PPO, then it scores the policy's."""
    problems, graded, gradings, solutions = [], [], [], []
    for a, b in zip(range(11, 19), range(31, 39), strict=True):
        row = {"problem": f"What is {a} + {b}?", "answer": str(a + b), "criteria": CRITERIA}
        problems.append(row)
        for solution, points in ((f"{a} + {b} = {a + b}, so \\boxed{{{a + b}}}.", 10), (f"\\boxed{{{a + b}}}", 5), ("No idea.", 0)):
            graded.append({"question": row["problem"], "criteria": CRITERIA, "answer": solution, "score": points})
            solutions.append(conversation(row["problem"], solution, system=INSTRUCTION))
            prompt = judge_prompt(Path("recipes/rubric/judge.jinja"), row, solution)
            for given in (points, points, (points + 5) % 15):  # a third of the gradings are careless
                gradings.append(conversation(prompt, f"As written.\nTotal Score: {given}/10"))
    for name, rows in {
        "graded": graded, "graded_test": graded[:4], "gradings": gradings, "solutions": solutions, "polaris": problems,
        "math_test": problems[:4],
    }.items():  # fmt: skip
        write_jsonl(Path(f"raw/{name}.jsonl"), rows)

    commands = page("rubric.md")
    commands.run("prepare tiny-model")
    commands.run("sft recipes/chain/sft.yaml")
    commands.run("prepare rubric-rl raw/graded.jsonl")
    commands.run("prepare rubric-rl raw/graded_test.jsonl")
    commands.run("sft recipes/tinyv/verifier_sft.yaml", *SMALL_SFT, "model.path=models/tiny", "run.epochs=12")
    commands.run("rl recipes/rubric/rm_train.yaml", *SMALL_PPO, "rollout.max_new_tokens=24")
    assert max(sample["reward"] for sample in samples_of("runs/rubric-rm", before="runs/rubric-rm-sft/model")) == 1.0
    commands.run("prepare math-rl raw/polaris.jsonl")
    commands.run("prepare math-rl raw/math_test.jsonl")
    commands.run(
        "rl recipes/rubric/ppo_tinyv_only.yaml", *SMALL_PPO, "model.path=runs/tiny/model", "rollout.max_new_tokens=48",
        "train.prompts_per_update=4", "rewards.0.judge.model.placement=resident", "rewards.0.judge.model.arguments=[]",
        "rewards.0.judge.sampling.max_new_tokens=24",
    )  # fmt: skip
    samples = samples_of("runs/rubric-ppo-tinyv-only", before="runs/tiny/model")
    scored = [(sample["response"], sample["reward"]) for sample in samples if sample["reward"] is not None]
    good = [reward for response, reward in scored if re.fullmatch(r"\d+ \+ \d+ = \d+, so \\boxed\{\d+\}\.", response)]
    bad = [reward for response, reward in scored if response == "No idea."]
    assert fmean(good) > fmean(bad) + 0.3


# Several reward models -----------------------------------------------------------------------------------------------


def common_words(one: str, other: str) -> float:
    both = set(one.split()), set(other.split())
    return len(both[0] & both[1]) / len(both[0] | both[1])


def assert_added_up(run: str, *rewards: str) -> None:
    """reward = 1 · first + 0.3 · second + 0.5 · third, in each sample; each of them differs between samples."""
    samples = samples_of(run, before="runs/tiny/model")
    parts = [[sample[f"part/{name}"] for name in rewards] for sample in samples]
    assert all(len(set(values)) > 1 for values in zip(*parts, strict=True))
    for sample, (first, second, third) in zip(samples, parts, strict=True):
        assert sample["failure"] or sample["reward"] == pytest.approx(first + 0.3 * second + 0.5 * third)


def test_several_rms(page, monkeypatch):
    """A rule and two reward models are added up; then the rule, a reward model and the similarity that a service computes."""
    folder = REPOSITORY / "recipes/several_rms"
    monkeypatch.syspath_prepend(str(folder))
    inputs = {name: runpy.run_path(str(folder / f"{name}.py"))["rm_preprocess"] for name in ("rider_reward", "consistency_reward")}
    criteria = 'Is this polite, and clear? End with a JSON object such as {"polite": 1, "clear": 0}.\n\n{response}'
    rows, demonstrations = [], []
    for i, problem in enumerate(("late", "cold", "lost", "wet", "small", "raw", "old", "torn")):
        question = f"Order {i} is {problem}. 1: refund, 2: replace."
        solution, words = 1 + i % 2, ("Agent: Sorry! We refund it.", "Agent: Sorry! We replace it.")
        answer = {
            "Thought": problem,
            "Solution": solution,
            "Knowledge": [i],
            "ResponseSolution": "as said",
            "Response": words[i % 2],
        }
        careless = answer | {"Solution": 3 - solution, "Response": "Agent: Wait."}
        prompts = {"grm_input": criteria, "rm_prompt_0": criteria, "rm_prompt_1": ""}  # the second reward model does not use it
        rows.append({"input": question, **prompts, "target": json.dumps(answer)})
        right, wrong = json.dumps(answer), json.dumps(careless)
        demonstrations += [conversation(question, right), conversation(question, wrong)]
        for shown, mark in ((right, 1), (wrong, 0), (wrong[: 40 + 6 * i] + right[-30:], 0)):
            marks = {"rider_reward": {"polite": mark, "clear": 1}, "consistency_reward": {"follows": mark, "says": mark}}
            for name, preprocess in inputs.items():
                [[message]] = preprocess([criteria], [shown], None)
                demonstrations.append(conversation(message["content"], json.dumps(marks[name])))
    write_jsonl(Path("raw/service.jsonl"), rows)
    write_jsonl(Path("raw/demonstrations.jsonl"), demonstrations)

    commands = page("several_rms.md")
    commands.run("prepare tiny-model")
    commands.run("sft recipes/chain/sft.yaml")
    commands.run("prepare math-rl raw/service.jsonl")
    small = (*SMALL_RL, "model.path=runs/tiny/model", "rollout.max_new_tokens=96", "train.prompts_per_update=4")
    models = [f"rewards.{i}.{setting}" for i in (1, 2) for setting in ("model.path=runs/tiny/model", "sampling.max_new_tokens=32")]
    commands.run("rl recipes/several_rms/single_node.yaml", *small, *models)
    assert_added_up("runs/several-rms-single-node", "rule", "rider_reward", "consistency_reward")
    with similarity_service(common_words) as (url, received):
        monkeypatch.setenv("BGE_URL", url)
        commands.run("rl recipes/several_rms/multi_node_bge.yaml", *small, *models[:2])
    assert received
    assert_added_up("runs/several-rms-multi-node-bge", "rule", "rider_reward", "similarity")
