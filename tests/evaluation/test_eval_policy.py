"""`plaudit eval policy`: figures by hand and by enumeration, samples that are kept and resumed, models side by side, bad input."""

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from plaudit.audit.evaluated import require_evaluated
from plaudit.errors import PlauditError
from plaudit.evaluation.cli import split_models
from plaudit.evaluation.policy import choose_ks
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.evaluation import EvalSettings
from support.evaluation import LONGER
from support.fault_server import FaultServer
from support.recipes import write_recipe
from support.rows import prompt_rows, write_jsonl

EXACT = {"kind": "exact"}
HAS_E = {"kind": "contains", "view": {"extract": "line"}}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("plaudit.evaluation.pictures.draw_policy", lambda *_: None)


@pytest.fixture
def evaluate(plaudit, tmp_path):
    """Runs the command with these rewards; returns its exit code, eval.json and all that it printed."""

    def run(prompts: Path, models: list[Any], rewards: dict[str, dict[str, Any]], *options: Any) -> tuple[int, dict, str]:
        recipes = [write_recipe(tmp_path / f"{name}.yaml", {"rewards": [reward]}) for name, reward in rewards.items()]
        out = tmp_path / "out"
        code, stdout, stderr = plaudit(
            "eval", "policy", *models, prompts, "--rewards", *recipes, "--out", out, "--resamples", 100, *options
        )  # fmt: skip
        found = json.loads((out / "eval.json").read_text()) if (out / "eval.json").exists() else {}
        return code, found, " ".join((stdout + stderr).split())

    return run


@pytest.fixture
def evaluate_responses(evaluate, monkeypatch, tmp_path, tiny_model):
    """The same for models that give these responses: by model, for each prompt."""

    def run(truths: list[Any], responses: dict[str, list[list[str] | None]], rewards: dict, *options: Any) -> tuple[int, dict, str]:
        def sample(job) -> list[str]:
            rows = [
                {
                    "id": f"prompts.jsonl:{i}", "data_source": ["odd", "even"][i % 2], "prompt": f"question {i}",
                    "reward_model": {"ground_truth": truth}, "responses": texts,
                    "status": ["truncated" if text.endswith("…") else "finished" for text in texts],
                    "tokens": [len(text) for text in texts],
                }
                for i, (truth, texts) in enumerate(zip(truths, responses[job.out.stem], strict=True))
                if texts is not None
            ]  # fmt: skip
            job.out.parent.mkdir(exist_ok=True)
            write_jsonl(job.out, rows[::-1])  # in the order in which they were finished
            return [row["id"] for row in rows]

        monkeypatch.setattr("plaudit.evaluation.policy.sample", sample)
        prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "?"}])
        n = len(next(texts for own in responses.values() for texts in own if texts))
        return evaluate(prompts, [f"{name}={tiny_model}" for name in responses], rewards, "-n", n, *options)

    return run


def values(found: dict, name: str, part: str = "all") -> dict[str, float]:
    return {figure: estimate["value"] for figure, estimate in found["figures"][name][part].items()}


# By hand -------------------------------------------------------------------------------------------------------------


def test_passes_and_majorities_by_hand(evaluate_responses):
    code, found, shown = evaluate_responses(["4", "7"], {"m": [["4", "4", "5", "6"], ["7", "8", "8", "8"]]}, {"rule": EXACT})
    assert code == 0
    own = values(found, "m")
    assert own["reward/rule"] == own["pass@1"] == own["majority@1"] == pytest.approx(3 / 8)
    assert own["pass@2"] == pytest.approx(fmean([1 - 1 / 6, 1 - 3 / 6]))
    assert own["pass@4"] == 1.0
    assert own["majority@2"] == pytest.approx(fmean([(1 + 4 * 0.5) / 6, 3 * 0.5 / 6]))  # a tie is a draw
    assert own["majority@4"] == 0.5
    assert values(found, "m", "data source/odd")["majority@4"] == 1.0
    assert "pass@2 66.7" in shown
    assert found["inputs"] | {"prompts": 2, "n": 4, "k": [1, 2, 4], "gold": "rule"} == found["inputs"]


def test_choosing_by_another_reward_is_measured_by_gold(evaluate_responses):
    """The shortest of four is right, and the proxy prefers long ones: the more it chooses from, the worse."""
    answers = ["4", "44", "444", "4444"]
    code, found, shown = evaluate_responses(["4"], {"m": [answers]}, {"rule": EXACT, "long": LONGER})
    own = values(found, "m")
    assert (code, own["best_of@1/long"], own["best_of@2/long"], own["best_of@4/long"]) == (0, 0.25, 0.0, 0.0)
    assert own["best_of@2/rule"] == own["pass@2"] == 0.5  # the most that choosing can reach
    assert own["proxy@2/long"] == pytest.approx(fmean(max(pair) for pair in combinations([1, 2, 3, 4], 2)) / 1000)
    curve = found["curves"]["best of n"]["m"]["long"]
    assert [point["n"] for point in curve] == [1, 2, 4]
    assert [point["root_kl"] for point in curve] == pytest.approx([0.0, 0.4395, 0.7977], abs=1e-4)  # √(log n − (n − 1)/n)
    assert [point["gold"]["value"] for point in curve] == [0.25, 0.0, 0.0]
    assert "Best of n by long: mean rule" in shown


def test_the_gold_reward_and_the_threshold_can_be_chosen(evaluate_responses):
    rewards, responses = {"long": LONGER, "rule": EXACT}, {"m": [["4", "44"]]}
    _, found, _ = evaluate_responses(["4"], responses, rewards, "--threshold", 0.002)
    assert (found["inputs"]["gold"], values(found, "m")["pass@1"]) == ("long", 0.5)
    assert "majority@1" not in values(found, "m")  # a length is no answer
    _, found, _ = evaluate_responses(["4"], responses, rewards, "--gold", "rule", "--k", "2")
    assert values(found, "m")["best_of@2/long"] == 0.0
    assert "pass@1" not in values(found, "m")


def test_lengths_truncated_and_malformed(evaluate_responses):
    boxed = {"kind": "exact", "view": {"extract": "boxed"}, "malformed": -1.0}
    code, found, shown = evaluate_responses(["4"], {"m": [[r"\boxed{4}", "4…", "four", r"\boxed{5}"]]}, {"rule": boxed})
    own = values(found, "m")
    assert (code, own["truncated"], own["malformed/rule"], own["tokens"]) == (0, 0.25, 0.5, (9 + 2 + 4 + 9) / 4)
    assert own["reward/rule"] == (1 - 1 - 1 + 0) / 4
    assert own["majority@4"] == 0.5  # 4 and 5 have one vote each; the others none
    assert "truncated 25.0" in shown


def test_models_are_compared_on_the_prompts_that_both_have(evaluate_responses):
    """The first prompt is too long for b."""
    responses = {"a": [["1", "x"], ["2", "2"], ["x", "x"]], "b": [None, ["2", "x"], ["x", "x"]]}
    code, found, shown = evaluate_responses(["1", "2", "3"], responses, {"rule": EXACT})
    assert code == 0
    assert (values(found, "a")["pass@1"], values(found, "b")["pass@1"]) == (0.5, 0.25)
    difference = found["differences"]["a - b"]["all"]["pass@1"]
    assert (difference["value"], difference["n"]) == (0.25, 2)
    assert found["inputs"]["models"]["b"]["prompts"] == 2
    assert "a - b" in shown


def test_responses_without_a_value_are_left_out_and_reported(evaluate_responses):
    code, found, shown = evaluate_responses(["4", None], {"m": [["4", "5"], ["4", "5"]]}, {"rule": EXACT})
    assert code == 1
    assert found["figures"]["m"]["all"]["pass@1"] | {"value": 0.5, "n": 1} == found["figures"]["m"]["all"]["pass@1"]
    assert found["details"]["m/rule"] | {"failed": 1, "without a value": 2} == found["details"]["m/rule"]
    assert "m/rule: 2 responses without a value (no_ground_truth)" in shown
    assert "1 of m/rule" in shown


def test_training_cannot_require_it(evaluate_responses, tmp_path):
    evaluate_responses(["4"], {"m": [["4", "5"]]}, {"rule": EXACT})
    settings = EvalSettings(require=str(tmp_path / "out/eval.json"), at_least={"pass@1": 0.1})
    with pytest.raises(PlauditError, match="is an evaluation of policy, not of rewards"):
        require_evaluated(settings, ScoreRecipe.model_validate({"rewards": [EXACT]}).rewards)


# With a model --------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.fixture
def prompts(tmp_path) -> Path:
    rows = [row | {"reward_model": {"ground_truth": "e"}} for row in prompt_rows(6)]
    return write_jsonl(tmp_path / "prompts.jsonl", rows)


SAMPLED = ("-n", 4, "--max-new-tokens", 8, "--device", "cpu")


def test_figures_are_those_of_the_kept_samples(evaluate, prompts, tiny_model, tmp_path):
    code, found, _ = evaluate(prompts, [tiny_model], {"rule": HAS_E, "long": LONGER}, *SAMPLED)
    assert code == 0
    samples = rows_of(tmp_path / f"out/samples/{tiny_model.name}.jsonl")
    texts = [row["responses"] for row in samples.values()]
    passes = [["e" in text.strip().rpartition("\n")[2] for text in own] for own in texts]
    assert 0 < sum(map(sum, passes)) < 24
    own = values(found, tiny_model.name)
    for k in (1, 2, 4):
        assert own[f"pass@{k}"] == pytest.approx(fmean(any(some) for each in passes for some in combinations(each, k)))
    best = [
        fmean(right for right, text in some if len(text) == max(len(text) for _, text in some))
        for each, own_texts in zip(passes, texts, strict=True)
        for some in combinations(list(zip(each, own_texts, strict=True)), 2)
    ]
    assert own["best_of@2/long"] == pytest.approx(fmean(best))
    assert own["tokens"] == pytest.approx(fmean(count for row in samples.values() for count in row["tokens"]))


def test_an_interrupted_evaluation_is_resumed(evaluate, prompts, tiny_model, tmp_path, monkeypatch):
    from plaudit.loops import sample as loop

    rewards = {"rule": HAS_E}
    _, whole, _ = evaluate(prompts, [tiny_model], rewards, *SAMPLED)
    samples = tmp_path / f"out/samples/{tiny_model.name}.jsonl"
    before = rows_of(samples)
    lines = samples.read_text(encoding="utf-8").splitlines(keepends=True)
    samples.write_text("".join(lines[:3]) + lines[3][:20], encoding="utf-8")  # as after a kill

    sampled: list[str] = []
    original = loop.sample_groups

    def spy(engine, prompts, *arguments, **options):
        sampled.extend(encoded.prompt.id for encoded in prompts)
        return original(engine, prompts, *arguments, **options)

    monkeypatch.setattr(loop, "sample_groups", spy)
    code, resumed, shown = evaluate(prompts, [tiny_model], rewards, *SAMPLED)
    assert (code, resumed["figures"]) == (0, whole["figures"])
    assert sorted(sampled) == sorted(before.keys() - {json.loads(line)["id"] for line in lines[:3]})
    assert {id: row["responses"] for id, row in rows_of(samples).items()} == {id: row["responses"] for id, row in before.items()}
    assert "has 3 of 6 prompts; resuming with the rest" in shown


def test_samples_are_reused_and_never_mixed(evaluate, prompts, tiny_model, monkeypatch):
    from plaudit.loops import sample as loop

    _, whole, _ = evaluate(prompts, [tiny_model], {"rule": HAS_E}, *SAMPLED)
    monkeypatch.setattr(loop, "load_engine", None)  # nothing is left to sample, with another reward and for fewer prompts neither
    assert evaluate(prompts, [tiny_model], {"rule": HAS_E}, *SAMPLED)[1]["figures"] == whole["figures"]
    code, found, _ = evaluate(prompts, [tiny_model], {"long": LONGER}, *SAMPLED, "--max-prompts", 2)
    assert (code, found["inputs"]["prompts"]) == (0, 2)
    code, _, shown = evaluate(prompts, [tiny_model], {"rule": HAS_E}, *SAMPLED, "-n", 5)
    assert code == 2
    assert "was made with other settings; choose another file, or use the same ones: n: 4 there, 5 now" in shown


def test_two_models_of_their_own(evaluate, prompts, tiny_models):
    models = [tiny_models["llama"], f"other={tiny_models['qwen2']}"]
    code, found, shown = evaluate(prompts, models, {"rule": HAS_E}, *SAMPLED, "--markdown")
    assert (code, list(found["figures"])) == (0, ["llama", "other"])
    a, b = values(found, "llama"), values(found, "other")
    assert found["differences"]["llama - other"]["all"]["tokens"]["value"] == pytest.approx(a["tokens"] - b["tokens"])
    assert "| | llama | other |" in shown


def test_a_served_model(evaluate, prompts, tiny_model):
    with FaultServer(model="policy") as server:
        server.reply = lambda _: "yes"
        code, found, _ = evaluate(prompts, [tiny_model], {"rule": HAS_E}, "-n", 2, "--url", server.url)
    assert (code, values(found, tiny_model.name)["pass@1"]) == (0, 1.0)
    code, _, shown = evaluate(prompts, ["a=x", "b=y"], {"rule": HAS_E}, "--url", server.url)
    assert code == 2
    assert "a server has one model: evaluate one at a time" in shown


# Bad input -----------------------------------------------------------------------------------------------------------


def test_models_and_prompts_are_told_apart():
    assert split_models(["m", "p.jsonl"]) == (["m"], ["p.jsonl"])
    assert split_models(["a=x/m", "org/b", "p.parquet", "q.json"]) == (["a=x/m", "org/b"], ["p.parquet", "q.json"])
    assert split_models(["org/model", "org/data:test"]) == (["org/model"], ["org/data:test"])


def test_every_k_is_a_power_of_two_or_n():
    assert choose_ks(None, 1) == [1]
    assert choose_ks(None, 12) == [1, 2, 4, 8, 12]
    assert choose_ks("4, 1", 4) == [1, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", "2,32"), "--k: 32 of 16 responses cannot be chosen; sample more (-n 32), or leave it out"),
        (("--k", "two"), "--k: should be numbers such as 1,4,16, not 'two'"),
        (("--k", "0"), "--k: should be at least 1, not 0"),
        (("--gold", "rul"), "--gold: no reward is called 'rul' (found: rule). Did you mean rule?"),
        (("--temperature", "0"), "greedy responses are all the same: choose a temperature, or -n 1"),
        (("--served-name", "x"), "it belongs to --url"),
    ],
)
def test_bad_options_are_reported_in_one_line(evaluate, prompts, tiny_model, options, message):
    code, found, shown = evaluate(prompts, [tiny_model], {"rule": EXACT}, *options)
    assert (code, found) == (2, {})
    assert message in shown


def test_bad_inputs_are_reported_in_one_line(evaluate, prompts, tiny_model, tmp_path):
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    cases = {
        (prompts, "no/such/model"): "MODEL: no/such/model does not exist",
        (prompts, None): f"eval policy needs a model and prompts: plaudit eval policy MODEL {prompts} --rewards R.yaml",
        (tmp_path / "none.jsonl", tiny_model): "PROMPTS: ",
        (empty, tiny_model): "empty.jsonl",
    }
    for (file, model), message in cases.items():
        code, found, shown = evaluate(file, [model] if model else [], {"rule": EXACT})
        assert (code, found) == (2, {}), shown
        assert message in shown
    code, _, shown = evaluate(prompts, [tiny_model, tiny_model], {"rule": EXACT})
    assert code == 2
    assert f"two of them are called '{tiny_model.parent.name}/{tiny_model.name}'; name them: first={tiny_model}" in shown
