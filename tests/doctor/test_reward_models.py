"""`plaudit doctor` on rewards with a model: sanity pairs, mismatches with the policy, memory."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

from plaudit.config import load
from plaudit.doctor import recording
from plaudit.doctor.memory import check_budgets
from plaudit.doctor.reward_models import check_ranks
from plaudit.doctor.rewards import check_answer_rules, check_reward
from plaudit.doctor.sanity_pairs import BUILT_IN_PAIRS, GIBBERISH, format_answer, make_pairs
from plaudit.errors import RecipeError
from plaudit.models.memory import Budget, Need, count_parameters, plan_reward_model
from plaudit.models.scalar import TOKENS_PER_PASS
from plaudit.recipe import ScoreRecipe, View
from plaudit.recipe.reward_models import RewardModel
from plaudit.rewards.view import see
from plaudit.train.memory_plan import plan_devices
from plaudit.train.processes import Processes
from plaudit.types import Prompt
from support.fault_server import FaultServer
from support.models import BOS_TEMPLATE, make_classifier
from support.paths import CHAT_TEMPLATES
from support.recipes import rl_recipe, write_recipe
from support.rows import prompt_rows, write_jsonl

TEMPLATES = CHAT_TEMPLATES
CPU = torch.device("cpu")
# The fault server echoes the prompt, so a judge's score is the one written in the template.
LENGTH_SCORE = "{{ question }}\n{{ response }}\nScore: [[{{ response | length }}]]"


@pytest.fixture(scope="module")
def scalar(tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models["llama"], tmp_path_factory.mktemp("doctor") / "rm")


@pytest.fixture
def server():
    with FaultServer() as fault_server:
        fault_server.max_model_len = 4096
        yield fault_server


@pytest.fixture
def doctor(plaudit, tmp_path, tiny_models, prompts_file):
    """Run `plaudit doctor` on these rewards: (exit code, findings, output)."""

    def run(*rewards: dict, stage: str = "score", overrides: tuple[str, ...] = (), **sections: Any):
        if stage == "score":
            tree: dict[str, Any] = {"stage": "score", "rewards": list(rewards)}
        else:
            prompts = sections.pop("prompts", prompts_file)
            tree = rl_recipe(sections.pop("policy", tiny_models["llama"]), prompts, tmp_path / "run", {}, **sections)
            tree |= {"stage": "rl", "rewards": list(rewards)}
        code, out, err = plaudit("doctor", write_recipe(tmp_path / "r.yaml", tree), *overrides)
        assert "Traceback" not in out + err
        assert out, err
        lines = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("  ") and line[2:3] in ("✓", "!", "✗")]
        return code, [(mark, check, text) for mark, check, text in lines], out

    return run


def copy_model(model: Path, folder: Path, *, without: str = "") -> Path:
    shutil.copytree(model, folder)
    if without:
        (folder / without).unlink()
    return folder


def judge_reward(url: str, template: Path, **settings: Any) -> dict:
    template.write_text(LENGTH_SCORE)
    model = {"placement": "server", "url": url, **settings.pop("model", {})}
    pattern = r"\[\[(\d+)\]\]"
    return {"kind": "judge", "model": model, "template": str(template), "parser": "regex", "pattern": pattern, **settings}


def findings_for(findings: list[tuple[str, str, str]], check: str) -> list[tuple[str, str]]:
    return [(mark, text) for mark, name, text in findings if name == check]


# Answer rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "warning"),
    [
        (
            [{"kind": "gsm8k", "when": {"data_source": "gsm8k"}}, {"kind": "math"}],
            "gsm8k and math reward the same answer: a right one",
        ),
        ([{"kind": "gsm8k", "when": {"data_source": "gsm8k"}}, {"kind": "math", "when": "otherwise"}], None),
        ([{"kind": "gsm8k"}, {"kind": "math", "combine": "max"}], None),
        ([{"kind": "gsm8k"}, {"kind": "math", "weight": 0}, {"kind": "contains", "text": "so"}], None),
        (
            [{"kind": "exact"}, {"kind": "contains", "weight": 0.5}],
            "exact and contains reward the same answer: a right one gets 1.5",
        ),
    ],
)
def test_rules_that_reward_the_same_answer(rewards, warning):
    found = list(check_answer_rules(ScoreRecipe.model_validate({"rewards": rewards}).rewards, []))
    assert [mark for mark, _ in found] == ([] if warning is None else ["!"])
    assert not found or found[0][1].startswith(warning or "")


def test_a_reward_is_tried_on_ground_truths_only_where_there_are_any():
    reward = ScoreRecipe.model_validate({"rewards": [{"kind": "length", "unit": "characters", "at_most": 3}]}).rewards[0]
    with_truth, without = (
        Prompt("a", [{"role": "user", "content": "?"}], "", "four"),
        Prompt("b", [{"role": "user", "content": "?"}]),
    )
    [(mark, text)] = check_reward(reward, [without])
    assert (mark, text.partition(";")[0]) == ("✓", "length: 1 for an empty answer")
    [(_, text)] = check_reward(reward, [with_truth, without])
    assert text.startswith("length: 0 for the ground truth, 1 for an empty answer;")


def test_rules_that_reward_the_same_answer_are_reported(doctor):
    _, findings, _ = doctor({"kind": "exact"}, {"kind": "contains", "weight": 0.5})
    assert [(mark, text[:43]) for mark, text in findings_for(findings, "rewards")] == [
        ("!", "exact and contains reward the same answer: ")
    ]


def test_rows_that_two_rules_reward_are_counted():
    rewards = ScoreRecipe.model_validate(
        {"rewards": [{"kind": "gsm8k", "when": {"data_source": "a*"}}, {"kind": "math", "when": {"data_source": ["ab", "c"]}}]}
    ).rewards
    prompts = [Prompt(str(i), [], data_source=source) for i, source in enumerate(["a", "ab", "c", "d"])]
    [(mark, text)] = check_answer_rules(rewards, prompts)
    assert (mark, "gsm8k and math reward the same answer in 1 of the 4 rows: a right one gets 2." in text) == ("!", True)
    assert not list(check_answer_rules(rewards, [prompts[0], prompts[2]]))


# Descriptions and sanity pairs ---------------------------------------------------------------------------------------


def test_scalar_model_in_process_is_described_and_scores_pairs(doctor, scalar):
    code, findings, out = doctor({"kind": "scalar_model", "name": "bt", "model": {"path": str(scalar)}}, stage="rl")
    assert code == 0
    (mark, description), *pairs = findings_for(findings, "reward")
    parameters = sum(tensor.numel() for tensor in load_file(scalar / "model.safetensors").values())
    assert mark == "✓"
    assert description.startswith(
        f"bt: scalar_model; LlamaForSequenceClassification with {parameters:,} parameters from {scalar}; float32 on cpu"
    )
    assert "resident; context 2,048 tokens; its own chat template; loaded in " in description
    assert len(pairs) == 2, "the rows have ground truths"
    for mark, text in pairs:
        good, bad = map(float, re.match(r"bt: (\S+) for '\d+', (\S+) for '\d+', to 'What is ", text).groups())  # pyright: ignore
        assert mark == ("✓" if good > bad else "!")
        assert text.endswith("it prefers the bad answer") == (good < bad)
    assert "What the model of reward bt reads:\n<|im_start|>user\nWhat is 0 + 0? Answer with a number.<|im_end|>\n" in out
    assert "<|im_start|>assistant\n0<|im_end|>" in out


def test_a_divided_model_is_checked_block_by_block(doctor, scalar):
    """In this one process, for a run of several."""
    code, findings, out = doctor({"kind": "scalar_model", "name": "bt", "model": {"path": str(scalar), "rank": [1, 0]}})
    assert code == 1
    assert [check for mark, check, _ in findings if mark == "✗"] == ["ranks"], "this recipe is to score, in one process"
    (_, description), *pairs = findings_for(findings, "reward")
    embeddings, layer = 320 * 64, (count_parameters(str(scalar)) - 320 * 64 - 2 * 64) // 2
    first, last = f"{embeddings + layer:,} parameters", f"{layer + 2 * 64:,} parameters"
    assert f"divided: layers 1 to 1 with {first} on rank 1, layers 2 to 2 with {last} on rank 0" in description
    assert all(re.match(r"bt: \S+ for '.*', \S+ for '.*', to", text) for _, text in pairs), pairs
    assert "bt, the largest of 2 blocks: weights, resident" in out


def test_ranks_that_are_not_there_are_reported():
    def check(size: int, ranks: list[int], **options: Any) -> list[tuple[str, str]]:
        rewards = ScoreRecipe.model_validate(
            {"rewards": [{"kind": "scalar_model", "model": {"path": "rm", "rank": ranks}}]}
        ).rewards
        return list(check_ranks(rewards, size, **options))

    assert check(2, [1, 0], training=True) == []
    [(mark, text)] = check(1, [0, 1], training=False)
    assert mark == "✗"
    assert "there is only one process" in text
    assert [mark for mark, _ in check(1, [0, 1], training=True)] == ["!"], "torchrun may start several"
    with pytest.raises(RecipeError, match=r"rm: model\.rank is \[0, 5\], but there are 2 processes"):
        check(2, [0, 5], training=True)


@pytest.mark.slow
def test_offloaded_critique_and_scorer(doctor, tiny_models, scalar):
    """A truncated critique is still scored, so a random critic is enough."""
    critic = {
        "kind": "critique_then_score",
        "name": "critic",
        "model": {"path": str(tiny_models["qwen2"]), "placement": "offload"},
        "sampling": {"max_new_tokens": 70},
        "scorer": {"kind": "scalar_model", "model": {"path": str(scalar), "placement": "offload"}},
    }
    _, findings, out = doctor(critic)
    reported = findings_for(findings, "reward")
    assert not [text for mark, text in reported if mark == "✗"]
    assert [text.split(";")[0] for _, text in reported[:2]] == ["critic: critique_then_score", "critic/scorer: scalar_model"]
    assert "float32 on cpu, offload" in reported[0][1]
    assert len(reported) == 2 + len(BUILT_IN_PAIRS)
    assert "\nCritique:\n" in out.split("What the model of reward critic/scorer reads")[1]
    assert out.count("one offloaded at a time") == 1


def test_served_judge_shows_the_messages_sent(doctor, server, tmp_path):
    code, findings, out = doctor(judge_reward(server.url, tmp_path / "t.jinja", name="far"))
    assert code == 0
    (_, description), *pairs = findings_for(findings, "reward")
    assert description.startswith(
        f"far: judge; model judge at {server.url}; context 4,096 tokens; messages rendered by the server; responded in 0."
    )
    assert [mark for mark, _ in pairs] == ["!", "!", "✓"], "the bad answer is as long, longer, shorter"
    assert pairs[0][1].endswith("10 for '7 + 5 = 12', 10 for '7 + 5 = 31', to 'What is 7 + 5?': it sees no difference")
    assert pairs[1][1].endswith("it prefers the bad answer")
    assert (
        f"The messages that reward far sends to {server.url}, rendered by the server:\n[user]\nWhat is 7 + 5?\n7 + 5 = 12\n" in out
    )
    assert len(server.requests) == 2 * len(BUILT_IN_PAIRS)


def test_served_embeddings_are_described_and_compared(doctor, server):
    code, findings, out = doctor({"kind": "similarity", "model": {"placement": "server", "url": server.url}})
    assert code == 0
    (_, description), *pairs = findings_for(findings, "reward")
    assert description.startswith(f"similarity: similarity; model judge at {server.url}; context 4,096 tokens; responded in 0.")
    assert len(pairs) == len(BUILT_IN_PAIRS)
    assert "rendered by the server" not in out


def test_served_model_with_a_local_tokenizer_is_rendered(doctor, server, tmp_path, tiny_model):
    reward = judge_reward(server.url, tmp_path / "t.jinja", model={"path": "judge", "tokenizer": str(tiny_model)})
    _, _, out = doctor(reward)
    assert "What the model of reward judge reads:\n<|im_start|>user\nWhat is 7 + 5?\n7 + 5 = 12\nScore: [[10]]<|im_end|>" in out


@pytest.mark.parametrize("kind", ["group_judge", "pairwise_judge"])
def test_pair_is_scored_as_one_group(doctor, server, kind):
    code, findings, _ = doctor(
        {"kind": kind, "model": {"placement": "server", "url": server.url}, "limits": {"unreadable_retries": 5}}
    )
    assert code == 1, "the echoed prompt is not a verdict"
    failed = findings_for(findings, "reward")[1:]
    assert {mark for mark, _ in failed} == {"✗"}
    assert all(
        "unparsable: the judge's answer cannot be parsed (2 attempts)" in text and "Its answer: 'answer to " in text
        for _, text in failed
    )
    assert len(server.requests) == len(BUILT_IN_PAIRS) * 2 * (2 if kind == "pairwise_judge" else 1), (
        "one retry, whatever the recipe allows"
    )


def test_unparsable_judge_in_process_fails(doctor, tiny_models):
    reward = {"kind": "judge", "model": {"path": str(tiny_models["qwen2"])}, "sampling": {"max_new_tokens": 20}}
    code, findings, _ = doctor(reward)
    assert code == 1
    assert [mark for mark, _ in findings_for(findings, "reward")] == ["✓", "✗", "✗", "✗"]
    assert "unparsable" in findings_for(findings, "reward")[1][1]


def test_cascade_checks_its_rule_and_its_judge(doctor, server, tmp_path):
    cascade = {"kind": "cascade", "rule": {"kind": "exact"}, "judge": judge_reward(server.url, tmp_path / "t.jinja")}
    _, findings, _ = doctor(cascade, stage="rl")
    rule, judge, *pairs = [text for _, text in findings_for(findings, "reward")]
    assert rule.startswith("exact: 1 for the ground truth, 0 for an empty answer")
    assert judge.startswith("cascade/judge: judge; model judge at ")
    assert all(text.startswith("cascade/judge: 1 for '") for text in pairs)


# Models that cannot be opened ----------------------------------------------------------------------------------------


def test_unusable_models_are_reported_in_one_line_each(doctor, tmp_path, tiny_model, scalar):
    bare = copy_model(scalar, tmp_path / "bare", without="tokenizer.json")
    (bare / "tokenizer_config.json").unlink()
    (tmp_path / "odd.jinja").write_text("{{ respnse }}")
    began = time.monotonic()
    code, findings, _ = doctor(
        {"kind": "judge", "name": "dead", "model": {"placement": "server", "url": "http://127.0.0.1:9"}},
        {"kind": "scalar_model", "name": "nowhere", "model": {"path": str(tmp_path / "bar")}},
        {"kind": "scalar_model", "name": "headless", "model": {"path": str(tiny_model)}},
        {"kind": "scalar_model", "name": "bare", "model": {"path": str(bare)}},
        {"kind": "judge", "name": "classifier", "model": {"path": str(scalar)}},
        {"kind": "judge", "name": "odd", "model": {"path": str(tiny_model)}, "template": str(tmp_path / "odd.jinja")},
        {"kind": "judge", "name": "long", "model": {"path": str(tiny_model), "max_prompt_tokens": 99999}},
        {"kind": "exact"},
    )
    assert time.monotonic() - began < 100
    assert code == 1
    messages = dict(text.split(": ", 1) for _, text in findings_for(findings, "reward"))
    assert [mark for mark, _ in findings_for(findings, "reward")] == ["✗"] * 7 + ["✓"]
    assert messages["dead"].startswith("http://127.0.0.1:9/v1/models: nothing listens there")
    assert messages["nowhere"] == f"{tmp_path / 'bar'}: no such folder. Did you mean {bare}?"
    assert "has no score: it is not a ...ForSequenceClassification" in messages["headless"]
    assert messages["bare"].startswith(f"no tokenizer could be loaded from {bare}")
    assert "scores and does not generate; use it with kind: scalar_model" in messages["classifier"]
    assert "odd.jinja uses respnse, which this kind does not provide." in messages["odd"]
    assert messages["odd"].endswith("Did you mean response?")
    assert "2,048 tokens: lower it" in messages["long"]


def test_broken_weights_fail(doctor, tmp_path, scalar):
    broken = copy_model(scalar, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights at all")
    code, findings, _ = doctor({"kind": "scalar_model", "model": {"path": str(broken)}})
    assert code == 1
    assert findings_for(findings, "reward")[0][0] == "✗"


def test_hanging_server_times_out(doctor, server, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "ANSWER_TIMEOUT_S", 0.5)
    server.fault_for_all = "hang"
    began = time.monotonic()
    code, findings, _ = doctor(judge_reward(server.url, tmp_path / "t.jinja", limits={"unreadable_retries": 3}))
    assert code == 1
    assert time.monotonic() - began < 100
    assert all(mark == "✗" and "timeout" in text for mark, text in findings_for(findings, "reward")[1:])


def test_slow_judge_is_cut_short_with_a_warning(doctor, tiny_models, monkeypatch):
    monkeypatch.setattr(recording, "GENERATION_BUDGET_S", 1e-3)
    reward = {"kind": "judge", "model": {"path": str(tiny_models["qwen2"])}, "sampling": {"max_new_tokens": 1024}}
    code, findings, _ = doctor(reward)
    assert code == 0, "a slow judge may still be a good one"
    assert all(
        text.endswith("slow: its answer was cut after 16 tokens: generation is slow on this machine")
        for _, text in findings_for(findings, "reward")[1:]
    )


def test_keys_are_never_printed(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "a-very-secret-key-of-ours")
    with FaultServer(key="a-very-secret-key-of-ours") as server:
        code, _, out = doctor(judge_reward(server.url, tmp_path / "t.jinja", model={"credential": "JUDGE_API_KEY"}))
        assert code == 0
        server.fault_for_all = "401"
        _, findings, more = doctor(judge_reward(server.url, tmp_path / "t.jinja", model={"credential": "JUDGE_API_KEY"}))
        mark, text = findings_for(findings, "reward")[-1]
        assert (mark, text.startswith(f"judge: {server.url}/v1/")) == ("✗", True), text
        assert "HTTP 401" in text
        assert "resume" not in text
        monkeypatch.setenv("JUDGE_API_KEY", "another-very-secret-key")
        _, _, third = doctor(judge_reward(server.url, tmp_path / "t.jinja", model={"credential": "JUDGE_API_KEY"}))
        assert "The key in JUDGE_API_KEY is not accepted: set that" in third
    assert "very-secret-key" not in out + more + third


def test_missing_field_in_a_built_in_question_is_only_a_warning(doctor, server, tmp_path):
    reward = judge_reward(server.url, tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_text("{{ extra_info.style }} {{ response }}")
    code, findings, _ = doctor(reward)
    assert code == 0
    assert all(
        mark == "!" and "no_field" in text and "your rows may have it" in text
        for mark, text in findings_for(findings, "reward")[1:]
    )


# Sanity pairs --------------------------------------------------------------------------------------------------------


def prompts_with(*truths: Any) -> list[Prompt]:
    return [Prompt(str(i), [{"role": "user", "content": f"{i}?"}], "", truth) for i, truth in enumerate(truths)]


def test_pairs_come_from_rows_whose_ground_truths_are_answers(scalar):
    [reward] = ScoreRecipe.model_validate({"rewards": [{"kind": "scalar_model", "model": {"path": str(scalar)}}]}).rewards
    assert [(p.good, p.bad) for p in make_pairs(reward, prompts_with("4", "4 ", 7, "9"))] == [("4", "7"), ("4", "7")]
    assert [(p.good, p.bad) for p in make_pairs(reward, prompts_with(["Paris", "paris"]))] == [("Paris", GIBBERISH)]
    for useless in ('{"refs": [1]}', {"a": 1}, None, "", True):
        assert make_pairs(reward, prompts_with(useless)) == list(BUILT_IN_PAIRS)


@pytest.mark.parametrize(
    "view",
    [{"extract": "boxed"}, {"extract": "answer"}, {"extract": "codeblock"}, {"extract": "tag", "tag": "answer"},
     {"extract": "line"}, {"extract": "oneline"}, {"think": "strict"}, {"think": "strict", "extract": "boxed"},
     {"think": "strip", "extract": "codeblock"}],
)  # fmt: skip
def test_view_extracts_the_formatted_answer(view):
    view = View.model_validate(view)
    assert see(view, format_answer(view, "42")).text == "42"


# Mismatches ----------------------------------------------------------------------------------------------------------


def mismatches(doctor, *rewards: dict, stage: str = "rl", **sections: Any) -> list[str]:
    """Warnings and errors about compatibility and context, with their marks."""
    _, findings, _ = doctor(*rewards, stage=stage, **sections)
    return [f"{mark} {text}" for mark, name, text in findings if name in ("mismatch", "context") and mark != "✓"]


def scalar_reward(scalar: Path, **settings: Any) -> dict:
    model = {"path": str(scalar), **settings.pop("model", {})}
    return {"kind": "scalar_model", "name": "bt", "model": model, **settings}


def test_compatible_model_has_no_mismatch(doctor, scalar):
    code, findings, _ = doctor(scalar_reward(scalar), stage="rl")
    assert code == 0
    assert findings_for(findings, "mismatch") == []
    [_, (mark, text)] = findings_for(findings, "context")
    assert mark == "✓"
    assert re.fullmatch(r"bt: with rollout.max_new_tokens = 12 it reads up to \d+ of 2,048 tokens", text)


def test_foreign_template_and_default_system_prompt_are_reported(doctor, scalar, tmp_path):
    template = TEMPLATES / "qwen25.jinja"
    foreign, system = mismatches(doctor, scalar_reward(scalar, model={"chat_template": str(template)}), stage="score")
    assert foreign.startswith(f"! bt: using {template}, not its own: ")
    assert system.startswith("! bt: its chat template adds a default system prompt, 'You are a patient teacher.'. If it was not")
    bare = copy_model(scalar, tmp_path / "bare", without="chat_template.jinja")
    [missing] = mismatches(doctor, scalar_reward(bare, model={"chat_template": "chatml"}), stage="score")
    assert missing.startswith("! bt: has no chat template; using chatml")


@pytest.mark.parametrize(
    ("template", "message"), [("<|endoftext|>" + BOS_TEMPLATE, "begins with two BOS tokens"), (None, "has none: set")]
)
def test_duplicate_and_missing_bos_are_reported(doctor, scalar, tmp_path, template, message):
    folder = copy_model(scalar, tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    [finding] = mismatches(doctor, scalar_reward(folder), stage="score")
    assert message in finding
    assert finding.startswith("! bt: ")


def test_policy_tokens_in_the_reward_models_input_are_reported(doctor, scalar, tiny_model, tmp_path):
    policy = copy_model(tiny_model, tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["<call>", "</call>"])
    tokenizer.save_pretrained(policy)
    rows = prompt_rows()
    rows[3]["prompt"][0]["content"] += "<|im_end|>"
    rows[5]["prompt"][0]["content"] += "<call>"
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    found = mismatches(doctor, scalar_reward(scalar), policy=policy, prompts=prompts, rollout={"stop": ["</call>", "<|im_start|>"]})
    assert [line.split(":")[1] for line in found] == [
        " the policy's </call> would be read as 7 tokens of plain text",
        " the policy's <call> would be read as 6 tokens of plain text",
        " the policy's <|im_end|> would be read as plain text, not as the reward model's own special token",
    ]
    assert "rollout.stop keeps it in responses" in found[0], "<|im_start|> is special, so no response contains it"
    assert "it occurs in 1 of 12 messages of the data; remove it" in found[1]


@pytest.mark.slow
def test_views_that_mishandle_thoughts_are_reported(doctor, scalar, tmp_path, tiny_model):
    def found(view: dict, *, thinks: bool = True, **sections: Any) -> list[str]:
        overrides = (f"model.chat_template={TEMPLATES / 'prefilled_think.jinja'}",) if thinks else ()
        return mismatches(doctor, scalar_reward(scalar, view=view), overrides=overrides, **sections)

    [keep] = found({"think": "keep"})
    assert re.search(r"would read its thoughts, with </think> split into \d tokens. view: \{think: strip\} removes them", keep)
    [strip] = found({"think": "strip"})
    assert "the policy's prompt already opens <think>" in strip
    assert found({"think": "strict"}) == []
    (tmp_path / "longcot.json").write_text(json.dumps({"longcot_delimiter": "<response>", "end_delimiter": None}))
    [empty] = found({"longcot_config": str(tmp_path / "longcot.json"), "strict": True})
    assert "its view leaves nothing to score of a response with <think> tags" in empty
    zero = copy_model(tiny_model, tmp_path / "zero")
    (zero / "longcot_config.json").write_text(json.dumps({"longcot_delimiter": "<response>"}))
    assert found({"longcot_config": "model", "strict": True}, policy=zero) == []
    [never] = found({"think": "strict"}, thinks=False)
    assert "view.think is strict, but the policy does not seem to think" in never


@pytest.mark.slow
def test_samples_too_long_for_the_reward_model_are_reported(doctor, scalar, tiny_models):
    [found] = mismatches(doctor, scalar_reward(scalar, model={"max_prompt_tokens": 100}), rollout={"max_new_tokens": 200})
    assert found.startswith("! bt: with rollout.max_new_tokens = 200 it reads up to 2")
    assert "of 100 tokens: longer samples would be malformed for 100% of the prompts; responses of up to about " in found
    [room] = map(int, re.findall(r"up to about (\d+) tokens fit", found))
    assert 60 < room < 80, "a prompt takes 23 tokens, and the template around the answer a few more"
    [found] = mismatches(doctor, scalar_reward(scalar, model={"max_prompt_tokens": 10}), rollout={"max_new_tokens": 200})
    assert found.startswith("✗ bt: ")
    assert "most prompts do not fit even with an empty response" in found
    # Only the longest prompts exceed the limit: rows 0, 3, 6 and 9 of twelve ask for a number.
    lengths = sorted(_tokens(scalar, row) for row in prompt_rows())
    limit = lengths[-5] + 12 + 1
    [found] = mismatches(doctor, scalar_reward(scalar, model={"max_prompt_tokens": limit}))
    assert "would be malformed for 33% of the prompts" in found
    group = {"kind": "group_judge", "name": "g", "model": {"path": str(tiny_models["qwen2"]), "max_prompt_tokens": 900}}
    found = mismatches(doctor, {**group, "sampling": {"max_new_tokens": 8}}, rollout={"n": 8, "max_new_tokens": 100})
    assert "longer samples would be malformed for 100%" in found[0], "eight responses together"
    assert mismatches(doctor, {**group, "sampling": {"max_new_tokens": 8}}, rollout={"n": 2, "max_new_tokens": 100}) == []


def _tokens(scalar: Path, row: dict) -> int:
    tokenizer = AutoTokenizer.from_pretrained(scalar)
    text = tokenizer.apply_chat_template([*row["prompt"], {"role": "assistant", "content": "0"}], tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) - 1


def test_lengths_for_a_served_model_are_estimated(doctor, server, tmp_path):
    server.max_model_len = 1100
    [found] = mismatches(doctor, judge_reward(server.url, tmp_path / "t.jinja"), rollout={"max_new_tokens": 500})
    assert "of 76 tokens (an estimate in the policy's tokens): longer samples would be malformed for 100%" in found


@pytest.mark.parametrize(("view", "warns"), [({}, True), ({"extract": "answer"}, False), ({"extract": "boxed"}, False)])
def test_a_verifier_that_reads_more_than_the_final_answer_is_reported(doctor, server, view, warns):
    reward = {"kind": "judge", "parser": "true_false", "model": {"placement": "server", "url": server.url}, "view": view}
    found = mismatches(doctor, reward, stage="score")
    assert any("view: {extract: answer}" in one for one in found) == warns


def test_missing_room_for_the_judges_answer_is_reported(doctor, server, tmp_path):
    def found(new: int, **model: int) -> list[str]:
        reward = judge_reward(server.url, tmp_path / "t.jinja", sampling={"max_new_tokens": new}, model=model)
        return mismatches(doctor, reward, stage="score")

    assert found(3000, max_prompt_tokens=1096) == []
    [cut] = found(3000, max_prompt_tokens=2000)
    assert cut.startswith("! judge: model.max_prompt_tokens 2,000 plus sampling.max_new_tokens 3,000 exceeds its context of 4,096")
    assert cut.endswith("Set max_prompt_tokens: 1,096")
    [none] = found(4096)
    assert none.startswith("✗ judge: sampling.max_new_tokens is 4,096 and the model's context 4,096: no room")


def test_policy_tokens_in_a_raw_prompt_are_reported(doctor, tiny_models, scalar, tmp_path):
    policy = copy_model(tiny_models["llama"], tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(policy)
    (tmp_path / "raw.jinja").write_text("<call>{{ response }}")
    model = {"path": str(tiny_models["qwen2"])}
    reward = {
        "kind": "judge",
        "model": model,
        "raw": True,
        "template": str(tmp_path / "raw.jinja"),
        "sampling": {"max_new_tokens": 4},
    }
    [found] = mismatches(doctor, reward, policy=policy)
    assert "the policy's <call> would be read as 6 tokens of plain text: it occurs in the raw prompt; use the reward" in found


# Memory --------------------------------------------------------------------------------------------------------------


def test_budget_adds_up_by_phase():
    budget = Budget(
        (
            Need("policy", ("sampling", "scoring", "training"), 10.0),
            Need("gradients", ("training",), 30.0),
            Need("cache", ("sampling",), 0.0, elastic=50.0),
            Need("resident", ("sampling", "scoring", "training"), 5.0),
            Need("first", ("scoring",), 20.0, elastic=4.0, in_turn=True),
            Need("second", ("scoring",), 22.0, in_turn=True),
        ),
        available=70.0,
    )
    assert [budget.at(phase) for phase in ("sampling", "scoring", "training")] == [65.0, 39.0, 45.0]
    assert [budget.at(phase, fixed_only=True) for phase in ("sampling", "scoring", "training")] == [15.0, 37.0, 45.0]
    assert budget.peak == "sampling"
    assert budget.verdict == "tight"
    assert Budget(budget.needs, 73.0).verdict == "fits"
    assert Budget(budget.needs, 45.0).verdict == "tight", "the cache can shrink"
    assert Budget(budget.needs, 44.0).verdict == "too much"


def test_reward_model_memory_matches_a_manual_count(tiny_models, scalar, tmp_path):
    """Width 64, 2 layers, 2 heads of 16 for keys and values, MLP 160."""
    parameters = sum(tensor.numel() for tensor in load_file(scalar / "model.safetensors").values())
    judge = RewardModel(path=str(tiny_models["qwen2"]))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        model = RewardModel(path=str(scalar)).model_copy(update={"dtype": dtype})
        plan = plan_reward_model(model, CPU, scalar=True, sequences=0, tokens=0)
        assert (plan.parameters, plan.weights, plan.elastic) == (parameters, size * parameters, False)
        assert plan.working == TOKENS_PER_PASS["cpu"] * size * (6 * 64 + 2 * 32 + 3 * 160)
        plan = plan_reward_model(judge.model_copy(update={"dtype": dtype}), CPU, scalar=False, sequences=3, tokens=7)
        assert (plan.working, plan.elastic) == (3 * 7 * 2 * 2 * 32 * size, True)


def test_a_divided_model_counts_with_its_largest_block(scalar):
    whole = RewardModel(path=str(scalar))
    plans = [
        plan_reward_model(model, CPU, scalar=True, sequences=0, tokens=0)
        for model in (whole, whole.model_copy(update={"rank": (0, 1)}))
    ]
    embeddings, layer = 320 * 64, (plans[0].parameters - 320 * 64 - 2 * 64) // 2
    assert plans[1].parameters == embeddings + layer
    assert plans[1].weights == 4 * (embeddings + layer)


def test_parameters_are_counted_across_shards(scalar, tmp_path):
    tensors = load_file(scalar / "model.safetensors")
    sharded = copy_model(scalar, tmp_path / "sharded", without="model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, in_shard in shards.items():
        save_file({name: tensors[name] for name in in_shard}, sharded / file)
    weight_map = {name: file for file, in_shard in shards.items() for name in in_shard}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert count_parameters(str(sharded)) == count_parameters(str(scalar)) == sum(t.numel() for t in tensors.values())
    (sharded / "b.safetensors").write_bytes(b"short")
    with pytest.raises(RecipeError, match=r"b\.safetensors: its weights cannot be read"):
        count_parameters(str(sharded))


@pytest.fixture
def budget_of(tmp_path, tiny_model, prompts_file, monkeypatch):
    def plan(*rewards: dict, available: float | None = None, **sections: Any) -> tuple[Budget, list[tuple[str, str]]]:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", {}, **sections)
        recipe = load(write_recipe(tmp_path / "b.yaml", {**tree, "stage": "rl", "rewards": list(rewards)})).recipe
        if available is not None:
            monkeypatch.setattr("plaudit.train.processes.total_memory", lambda _: available)
        budgets = plan_devices(recipe)
        return budgets["cpu"], list(check_budgets(recipe, budgets))

    return plan


def test_placement_decides_in_which_phases_a_model_counts(budget_of, scalar, tiny_models):
    plain, _ = budget_of({"kind": "exact"})
    weights = 4 * count_parameters(str(scalar))
    working = TOKENS_PER_PASS["cpu"] * 4 * (6 * 64 + 2 * 32 + 3 * 160)
    resident, _ = budget_of(scalar_reward(scalar))
    added = {phase: resident.at(phase) - plain.at(phase) for phase in ("sampling", "scoring", "training")}
    assert added == pytest.approx({"sampling": weights + working, "scoring": weights + working, "training": weights})
    judge = {
        "kind": "judge",
        "model": {"path": str(tiny_models["qwen2"]), "placement": "offload"},
        "sampling": {"max_new_tokens": 24},
    }
    cache = 12 * (64 + 12 + 24) * 2 * 2 * 32 * 4  # 3 prompts × 4 samples; prompt, response and answer
    both, _ = budget_of(scalar_reward(scalar, model={"placement": "offload"}), judge)
    largest = max(weights + working, 4 * count_parameters(str(tiny_models["qwen2"])) + cache)
    added = {phase: both.at(phase) - plain.at(phase) for phase in ("sampling", "scoring", "training")}
    assert added == pytest.approx({"sampling": 0, "scoring": largest, "training": 0})
    served, _ = budget_of({"kind": "judge", "model": {"placement": "server", "url": "http://127.0.0.1:9"}})
    assert served == plain


def test_memory_shortage_names_the_settings_to_change(budget_of, scalar):
    budget, [(mark, text)] = budget_of(scalar_reward(scalar))
    assert mark == "✓"
    assert text.startswith("cpu: at most 1.0 GB of ")
    most = budget.at(budget.peak)
    _, [(mark, text)] = budget_of(scalar_reward(scalar), available=1.05 * most)
    assert mark == "!"
    assert ": tight; when memory runs short" in text
    _, [(mark, text)] = budget_of(scalar_reward(scalar), available=0.5 * most)
    assert mark == "✗"
    assert text.endswith("placement: offload frees bt while other models run; placement: server moves it to another process.")
    _, [(mark, text)] = budget_of(scalar_reward(scalar, model={"placement": "offload"}), available=0.5 * most)
    assert mark == "✗"
    assert (
        "Set model.gradient_checkpointing=true, move the reward models to a server (placement: server), or use model.lora" in text
    )


def test_launched_server_is_reported_outside_the_budget(budget_of, scalar):
    plain, _ = budget_of({"kind": "exact"})
    budget, findings = budget_of(scalar_reward(scalar, model={"placement": "launch"}))
    assert budget == plain
    assert findings[1][1].startswith("bt: placement: launch starts a server on this machine, which is not in the table")


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.9),
        ({"arguments": "--gpu-memory-utilization 0.3"}, 0.3),
        ({"dialect": "sglang", "arguments": "--mem-fraction-static=0.4"}, 0.4),
    ],
)
def test_a_server_that_sleeps_counts_while_groups_are_collected(tmp_path, scalar, tiny_model, prompts_file, settings, share):
    def plan(**model: Any) -> tuple[dict[str, Budget], list[tuple[str, str]]]:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", {}, run={"device": "auto"})
        rewards = [scalar_reward(scalar, model={"placement": "launch", **settings, **model})]
        recipe = load(write_recipe(tmp_path / "b.yaml", {**tree, "stage": "rl", "rewards": rewards})).recipe
        budgets = plan_devices(recipe, processes=Processes(kind="cuda", memory=80e9))
        return budgets, list(check_budgets(recipe, budgets, Processes(kind="cuda", memory=80e9)))

    (awake, findings), (sleeping, sleeping_findings) = plan(), plan(sleep=True)
    added = {phase: sleeping["cuda"].at(phase) - awake["cuda"].at(phase) for phase in ("sampling", "scoring", "training")}
    assert added == pytest.approx({"sampling": share * 80e9, "scoring": share * 80e9, "training": 1.5e9})
    on_host = {phase: sleeping["cpu"].at(phase) - awake["cpu"].at(phase) for phase in ("sampling", "training")}
    assert on_host == pytest.approx({"sampling": 0, "training": 2 * count_parameters(str(scalar))})
    assert [text.startswith("bt: placement: launch") for _, text in findings][-1]
    assert not any(text.startswith("bt") for _, text in sleeping_findings)  # it is in the table
    assert ("Lower the server's share" in str(sleeping_findings)) == (share == 0.9)


def test_memory_table_is_printed(doctor, scalar, tiny_model):
    _, _, out = doctor(scalar_reward(scalar), stage="rl")
    table = out.split("Memory on cpu, ")[1].split("\n\n")[0].splitlines()
    assert table[1].split() == ["sampling", "scoring", "training"]
    assert [line.split("  ")[1] for line in table[2:]] == [
        "torch and other libraries", "policy: weights", "policy: moments, masters", "policy: activations, logits, gradients",
        "cache: 12 × 41 tokens", "engine: logits, prompts", "engine: packed weights", "checkpoint: copy while it is written",
        "bt: weights, resident", "bt: while it scores", "total",
    ]  # fmt: skip
    assert AutoConfig.from_pretrained(tiny_model).num_hidden_layers == 2, "the cache size above is for two layers"
    _, _, out = doctor(scalar_reward(scalar))
    assert "Memory on cpu" in out
    assert ", while scoring" in out
    assert "policy" not in out
