"""Every algorithm through the full loop on a tiny model: it runs, its update matches its formula however it is split, its state
resumes, and settings without effect are refused."""

import json
import math
import re
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from plaudit.config import load
from plaudit.doctor.rewards import check_algorithm
from plaudit.errors import RecipeError
from plaudit.explain import explain, to_yaml
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import load_model
from plaudit.objectives.advantages import StepRewards
from plaudit.objectives.aggregate import sequence_weights
from plaudit.objectives.registry import ESTIMATORS, POLICY_LOSSES
from plaudit.recipe import AlgorithmSettings, KLRewardSettings, ModelSettings, RLRecipe
from plaudit.rl.estimators import estimate_advantages, token_rewards
from plaudit.rl.experience import Update, make_update
from plaudit.rl.kl_penalty import KLPenalty
from plaudit.rl.losses import policy_loss
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Experience
from support.experience import EVERYTHING, batches_of, handmade_samples
from support.paths import REPOSITORY
from support.recipes import Stopped, rl_recipe, stop_before, train_rl, write_recipe

# Without a critic; ppo is tested in test_critic.py.
KINDS = tuple(name for name, estimator in ESTIMATORS.items() if "critic" not in estimator.needs)
GROUP_KINDS = tuple(name for name, estimator in ESTIMATORS.items() if "group" in estimator.needs)
SEVERAL_UPDATES = {"prompts_per_step": 4, "prompts_per_update": 2, "tokens_per_micro_batch": 256}
ALGORITHMS = {
    "GRPO": {"kind": "grpo"},
    "Dr.GRPO": {"kind": "grpo", "divide_by_std": False, "aggregation": "seq-mean-token-sum-norm"},
    "DAPO": {"kind": "grpo", "clip_ratio": [0.2, 0.28], "aggregation": "token-mean"},
    "RLOO": {"kind": "rloo", "kl_reward": {"coefficient": 0.01}},
    "REINFORCE": {"kind": "rloo", "loss": "policy_gradient"},
    "OPO": {"kind": "opo"},
    "REINFORCE++": {"kind": "reinforce++", "discount": 0.99, "kl_reward": {"coefficient": 0.01, "target": 0.05, "horizon": 100}},
    "REINFORCE++ baseline": {"kind": "reinforce++-baseline", "kl_coefficient": 0.001, "kl_estimator": "k2"},
    "ReMax": {"kind": "remax", "loss": "policy_gradient"},
    "GDPO": {"kind": "gdpo"},
    "GSPO": {
        "kind": "grpo",
        "divide_by_std": False,
        "loss": "gspo",
        "clip_ratio": [3e-4, 4e-4],
        "aggregation": "seq-mean-token-mean",
    },
    "CISPO": {"kind": "grpo", "loss": "cispo", "clip_ratio": [0.9, 0.28]},
    "positive SFT": {"kind": "grpo", "positive_sft_coefficient": 0.1, "entropy_coefficient": 0.001},
    "truncated importance": {"kind": "grpo", "importance": {"level": "token", "high": 2.0}},
    "masked importance": {"kind": "grpo", "importance": {"level": "sequence", "mode": "mask", "low": 0.5, "high": 2.0}},
}


def test_every_registered_name_is_trained_with():
    assert {algorithm["kind"] for algorithm in ALGORITHMS.values()} == set(KINDS)
    assert {algorithm.get("loss", "clipped") for algorithm in ALGORITHMS.values()} == set(POLICY_LOSSES)


def test_registered_settings_exist():
    """Each is a setting of `algorithm` and an argument of the function."""
    for entry in (*ESTIMATORS.values(), *POLICY_LOSSES.values()):
        assert set(entry.settings) <= AlgorithmSettings.model_fields.keys(), entry.name
        parameters = signature(entry.load()).parameters
        assert all(name in parameters for name in entry.settings if name != "clip_ratio"), entry.name


@pytest.fixture(scope="module", autouse=True)
def prompts_file(relative_prompts) -> Path:
    return relative_prompts


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file):
    """Writes a recipe whose run folder has the same name. Two rewards, so that GDPO has something to do."""

    def write(name: str = "run", **sections) -> Path:
        gdpo = sections.get("algorithm", {}).get("kind") == "gdpo"
        reward = {"kind": "regex", "pattern": "[a-z]", "normalise": "group" if gdpo else "none"}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, reward, **sections)
        tree["rewards"].append({**reward, "name": "digits", "pattern": "[0-9]", "weight": 0.5})
        return write_recipe(tmp_path / f"{name}.yaml", tree)

    return write


@pytest.fixture
def recorded(monkeypatch) -> list[list[Experience]]:
    """Records the samples of every update."""
    recorded: list[list[Experience]] = []

    def make_and_record(samples, *arguments, **settings):
        recorded.append(list(samples))
        return make_update(samples, *arguments, **settings)

    monkeypatch.setattr("plaudit.rl.learner.make_update", make_and_record)
    return recorded


def metrics_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


# Two steps of each ----------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps(tmp_path, recipe, tiny_model, name):
    model = train_rl(recipe(algorithm=ALGORITHMS[name], train=SEVERAL_UPDATES))
    rows, settings = metrics_of(tmp_path / "run"), ALGORITHMS[name]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["grad_norm"] > 0
        assert {"ratio", "clip_fraction", "policy_kl", "entropy", "mismatch"} <= row.keys()
        assert ("importance" in row) == ("importance" in settings)
        assert ("kl_reward" in row) == ("kl_reward" in settings)
        assert ("kl" in row) == ("kl_reward" in settings or "kl_coefficient" in settings)
        assert ("baseline_reward" in row) == (settings["kind"] == "remax")
        assert ("positive_sft_loss" in row) == ("positive_sft_coefficient" in settings)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model, model))
    assert any(not torch.equal(before[weight], after[weight]) for weight in after)


def test_one_sample_per_prompt_is_enough_without_group_comparison(tmp_path, recipe):
    for kind in ("reinforce++", "remax"):
        train_rl(recipe(kind, algorithm={"kind": kind}, rollout={"n": 1}, run={"max_steps": 1}))
        assert metrics_of(tmp_path / kind)[0]["grad_norm"] > 0


FAILS_ON_SOME = """
def compute_score(solution_str):
    if len(solution_str) % 3 == 0:
        raise ValueError("cannot score this length")
    return len(solution_str)
"""


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_samples_are_not_trained_on(tmp_path, recipe, recorded, kind):
    """For every kind: samples whose reward failed are in no update, and the others have finite advantages."""
    (tmp_path / "reward.py").write_text(FAILS_ON_SOME)
    file = recipe(algorithm={"kind": kind}, run={"max_steps": 1})
    tree = json.loads(file.read_text())
    tree["rewards"] = [
        {"kind": "function", "path": str(tmp_path / "reward.py"), "workers": 1, "limits": {"timeout_s": 60},
         "max_failure_rate": 1.0, "normalise": "group" if kind == "gdpo" else "none"}
    ]  # fmt: skip
    train_rl(write_recipe(file, tree))
    [row] = metrics_of(tmp_path / "run")
    assert 0 < row["dropped"] < 12
    assert sum(map(len, recorded)) == 12 - row["dropped"]
    assert all(np.isfinite(sample.advantages).all() for samples in recorded for sample in samples)
    assert any(sample.advantages.any() for samples in recorded for sample in samples)


# Advantages of a step -------------------------------------------------------------------------------------------------


def end_rewards(*rewards: float, length: int = 2) -> list[torch.Tensor]:
    """Token rewards of samples of one length, each rewarded at its last token."""
    return [torch.tensor([0.0] * (length - 1) + [reward], dtype=torch.float64) for reward in rewards]


def token_advantages(
    rewards: list[torch.Tensor], sizes: list[int], algorithm: AlgorithmSettings, baselines: list[float | None] | None = None
) -> list[np.ndarray]:
    """Advantages of samples in groups of these sizes."""
    greedy = torch.tensor([math.nan if b is None else b for b in baselines], dtype=torch.float64) if baselines else None
    return estimate_advantages(StepRewards(rewards, torch.tensor(sizes), greedy), algorithm).advantages


def test_each_kind_by_hand():
    """Two groups, 1 3 | 0 0, of two tokens each. Centred: −1 1 | 0 0, whose variance over 4 is 2/3, over 8 tokens 4/7."""
    rewards, sizes = end_rewards(1, 3, 0, 0), [2, 2]

    def per_sample(kind: str, **settings) -> list[float]:
        found = token_advantages(rewards, sizes, AlgorithmSettings(kind=kind, **settings), baselines=[2.0, 0.5])
        assert all(A[0] == A[1] for A in found)
        return [A[0].item() for A in found]

    root = math.sqrt
    assert per_sample("grpo", divide_by_std=False) == [-1, 1, 0, 0]
    assert per_sample("grpo") == pytest.approx([-1 / root(2), 1 / root(2), 0, 0], abs=1e-6)
    assert per_sample("rloo") == [-2, 2, 0, 0]
    assert per_sample("gdpo") == pytest.approx([-root(3 / 2), root(3 / 2), 0, 0], abs=1e-7)
    assert per_sample("reinforce++-baseline") == pytest.approx([-root(7 / 4), root(7 / 4), 0, 0], abs=1e-7)
    assert per_sample("remax") == [-1, 1, -0.5, -0.5]
    # Rewards less their mean of 1: 0 2 −1 −1, whose variance over 8 tokens is 12/7.
    assert per_sample("reinforce++") == pytest.approx([0, 2 / root(12 / 7), -1 / root(12 / 7), -1 / root(12 / 7)], abs=1e-7)


def test_opo_weights_its_baseline_by_length():
    """Rewards 1 and 5 of lengths 3 and 1: the baseline is (3·1 + 1·5) / 4 = 2. Equal rewards of any lengths: 0."""
    rewards = [*end_rewards(1, length=3), *end_rewards(5, length=1), *end_rewards(0.1, length=7), *end_rewards(0.1, length=2)]
    found = token_advantages(rewards, [2, 2], AlgorithmSettings(kind="opo"))
    assert [A.tolist() for A in found] == [[-1.0] * 3, [3.0], [0.0] * 7, [0.0] * 2]


def test_reinforce_plus_plus_discounts_tokens_far_from_the_end():
    [A] = token_advantages(end_rewards(1, length=3), [1], AlgorithmSettings(kind="reinforce++", discount=0.5))
    returns = np.array([0.25, 0.5, 1.0])
    np.testing.assert_allclose(A, (returns - returns.mean()) / returns.std(ddof=1), atol=1e-7)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_group_of_one_gets_zero_advantage_and_affects_no_other(kind):
    """The other groups' advantages are the same without it. (Dropped samples have been removed by then.)"""
    algorithm = AlgorithmSettings(kind=kind)
    without_it = token_advantages(end_rewards(1, 3, 0, 4), [2, 2], algorithm)
    with_it = token_advantages(end_rewards(1, 3, 100, 0, 4), [2, 1, 2], algorithm)
    assert with_it[2].tolist() == [0.0, 0.0]
    for A, B in zip(without_it, [*with_it[:2], *with_it[3:]], strict=True):
        assert np.array_equal(A, B)


def test_a_group_whose_greedy_sample_was_dropped_gets_zero_advantage():
    found = token_advantages(end_rewards(1, 3, 0, 4), [2, 2], AlgorithmSettings(kind="remax"), baselines=[None, 1.0])
    assert [A[0].item() for A in found] == [0, 0, -1, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_groups_and_samples_does_not_change_advantages(kind):
    algorithm = AlgorithmSettings(kind=kind)
    in_order = token_advantages(end_rewards(1, 3, 7, 0, 4), [3, 2], algorithm, baselines=[2.0, 0.5])
    backwards = token_advantages(end_rewards(4, 0, 7, 3, 1), [2, 3], algorithm, baselines=[0.5, 2.0])
    for A, B in zip(in_order, reversed(backwards), strict=True):
        np.testing.assert_allclose(A, B, rtol=0, atol=1e-12)


# KL in the reward -----------------------------------------------------------------------------------------------------


OLD_LOGPROBS = [np.array([-1.0, -1.0]), np.array([-1.0])]
REF_LOGPROBS = [np.array([-2.0, -3.0]), np.array([-1.0])]


def test_kl_is_subtracted_from_every_tokens_reward():
    """log π_old − log ref is 1 and 2, and 0; β = 0.1: the first sample is worth 5 − 0.3, the second 3."""
    costs, metrics = KLPenalty(KLRewardSettings(coefficient=0.1)).costs(OLD_LOGPROBS, REF_LOGPROBS)
    rewards = token_rewards([5.0, 3.0], [2, 1], costs)
    first, second = token_advantages(rewards, [2], AlgorithmSettings(kind="grpo", divide_by_std=False))
    np.testing.assert_allclose(first, [0.85, 0.85])
    np.testing.assert_allclose(second, [-0.85])
    assert metrics == {"kl_reward_coefficient": 0.1, "kl_reward": pytest.approx(1.0)}
    # The return of the first token is −0.1 − 0.2 + 5, of the second −0.2 + 5.
    remax, _ = token_advantages(rewards, [2], AlgorithmSettings(kind="remax"), baselines=[4.0])
    np.testing.assert_allclose(remax, [0.7, 0.8])


def test_the_coefficient_adapts_after_the_step_and_is_saved():
    penalty = KLPenalty(KLRewardSettings(coefficient=0.1, target=0.5, horizon=10))
    _, first = penalty.costs(OLD_LOGPROBS, REF_LOGPROBS)
    _, second = penalty.costs(OLD_LOGPROBS, REF_LOGPROBS)
    assert first["kl_reward_coefficient"] == 0.1
    assert second["kl_reward_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    again = KLPenalty(penalty.settings)
    again.load_state(json.loads(json.dumps(penalty.state())))
    assert again.coefficient == penalty.coefficient
    again.load_state({})
    assert again.coefficient == 0.1


def test_an_adaptive_coefficient_is_resumed_exactly(tmp_path, recipe, monkeypatch):
    settings = {
        "algorithm": {"kind": "reinforce++", "kl_reward": {"coefficient": 0.05, "target": 1e-4, "horizon": 30}},
        "run": {"max_steps": 4, "save_every": 1},
    }
    train_rl(recipe("reference", **settings))
    file = recipe("stopped", **settings)
    stop_before(monkeypatch, 3)
    with pytest.raises(Stopped):
        train_rl(file)
    train_rl(file)
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    coefficients = [row["kl_reward_coefficient"] for row in metrics_of(reference)]
    assert len(set(coefficients)) == 4, "it changes in every step"
    assert metrics_of(stopped) == metrics_of(reference)
    for name in ("model/model.safetensors", "checkpoints/step_000004/state.json"):
        assert (stopped / name).read_bytes() == (reference / name).read_bytes()


@pytest.mark.slow
def test_a_fixed_coefficient_holds_the_policy_back(tmp_path, recipe):
    """AdamW takes full steps on noise too, so a tiny model never stands still; KL keeps it from drifting away."""
    for name, coefficient in (("loose", 1e-6), ("held", 3.0)):
        settings = {"kind": "reinforce++", "kl_reward": {"coefficient": coefficient}}
        train_rl(recipe(name, algorithm=settings, rollout={"n": 8}, run={"max_steps": 12}))
    loose, held = (metrics_of(tmp_path / name)[-1]["kl"] for name in ("loose", "held"))
    assert held < loose / 2


# ReMax's baseline -----------------------------------------------------------------------------------------------------


def test_the_greedy_sample_is_scored_and_not_trained_on(tmp_path, recipe, recorded, monkeypatch):
    requested = set()
    generate = NativeEngine.generate

    def generate_and_record(self, requests, sampling):
        requested.update((sampling.temperature, request.n) for request in requests)
        return generate(self, requests, sampling)

    monkeypatch.setattr(NativeEngine, "generate", generate_and_record)
    train_rl(recipe(algorithm={"kind": "remax"}, run={"max_steps": 1}))
    assert requested == {(0.0, 1), (1.0, 4)}
    [samples] = recorded
    assert len(samples) == 3 * 4
    # A = reward − baseline, with one baseline for all samples of a prompt.
    for group in (samples[0:4], samples[4:8], samples[8:12]):
        baselines = {round(sample.reward - sample.advantages[0], 9) for sample in group}
        assert len(baselines) == 1
    [row] = metrics_of(tmp_path / "run")
    mean = np.mean([sample.reward - sample.advantages[0] for sample in samples])
    assert row["baseline_reward"] == pytest.approx(mean)


# The loss of an update ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(ModelSettings(path=str(tiny_model), dtype="float32"), torch.device("cpu")).double()


def gradient_of(model, update: Update, algorithm: AlgorithmSettings, budget: int) -> tuple[float, dict, dict]:
    """Loss, gradient and metrics of an update, summed over micro-batches."""
    model.zero_grad()
    loss, total, metrics = policy_loss(model, update.num_tokens, algorithm, 0.9), 0.0, {}
    for batch in batches_of(update, budget):
        share, others = loss(batch)
        share.backward()
        total += share.item()
        metrics = {name: metrics.get(name, 0.0) + value.item() for name, value in others.items()}
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}, metrics


@pytest.mark.grid(3)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo", "policy_gradient"])
def test_split_and_order_do_not_change_the_update(model, loss, aggregation):
    """With every other term enabled: one sample per micro-batch, several, and all in one; in both orders."""
    algorithm = AlgorithmSettings(loss=loss, aggregation=aggregation, **EVERYTHING)
    update, reverse = (make_update(handmade_samples()[::order], algorithm, horizon=12) for order in (1, -1))
    total, gradient, metrics = gradient_of(model, update, algorithm, 10_000)
    assert 0 < metrics["importance_bounded"] < 1
    for others, budget in ((update, 1), (update, 20), (reverse, 10_000), (reverse, 20)):
        again, other_gradient, other_metrics = gradient_of(model, others, algorithm, budget)
        assert again == pytest.approx(total, rel=1e-7)
        assert other_metrics == pytest.approx(metrics, rel=1e-6)
        for name, g in gradient.items():
            # Not tighter: advantages and log-probs are packed in fp32, transformers computes norms in fp32.
            assert (other_gradient[name] - g).norm() <= 1e-6 * g.norm(), name


def test_positive_sft_is_a_mean_over_tokens_with_positive_advantage(model):
    """Only the first and third sample have A > 0; they alone count, weighted by A."""
    samples = [replace(s, advantages=np.full(s.num_targets, A)) for s, A in zip(handmade_samples(), (2, -1, 1, 0, -3), strict=True)]
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        algorithm = AlgorithmSettings(loss="policy_gradient", aggregation=aggregation, positive_sft_coefficient=0.5)
        update = make_update(samples, algorithm, horizon=12)
        expected_weights = sequence_weights(torch.tensor([1, 0, 3, 0, 0]), aggregation, horizon=12).tolist()
        assert update.positive_weights == expected_weights
        _, _, metrics = gradient_of(model, update, algorithm, 10_000)
        with torch.no_grad():
            [batch] = batches_of(update)
            logprobs = target_logprobs(model, batch, temperature=0.9).logprobs_N.split([s.num_targets for s in samples])
        expected = -(expected_weights[0] * 2 * logprobs[0].sum() + expected_weights[2] * 1 * logprobs[2].sum())
        assert metrics["positive_sft_loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_counts_the_target_tokens_of_each_sequence():
    for batch in batches_of(Update(handmade_samples(), [1.0] * 5), 20):
        starts = batch.starts_S1.tolist()
        counted = [int(batch.loss_mask_T[a:b].sum()) for a, b in pairwise(starts)]
        assert batch.target_lengths_S.tolist() == counted


# Settings without effect ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "gspo", "dual_clip": 5.0}, "dual_clip has no effect: it applies to loss clipped, not gspo. Remove it"),
        (
            {"loss": "policy_gradient", "clip_ratio": 0.1},
            "clip_ratio has no effect: it applies to loss clipped, gspo, cispo, not policy_gradient",
        ),
        (
            {"loss": "policy_gradient", "old_logprobs": "sampler"},
            "old_logprobs has no effect: loss policy_gradient has no ratio; to train without importance weights, set importance=",
        ),
        # The default value is refused too: whoever writes it down expects an effect.
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip has no effect: it applies to loss clipped, not cispo"),
        ({"loss": "policy_gradient", "clip_ratio": 0.2}, "clip_ratio has no effect"),
        ({"loss": "policy_gradient", "old_logprobs": "recomputed"}, "old_logprobs has no effect"),
        (
            {"kl_estimator": "k3"},
            "kl_estimator has no effect: no KL is computed; set kl_coefficient or kl_reward",
        ),
        ({"kind": "rloo", "divide_by_std": True}, "divide_by_std has no effect: it applies to kind grpo, not rloo. Remove it"),
        ({"discount": 1.0}, "discount has no effect: it applies to kind reinforce[+][+] and ppo, not grpo"),
        ({"gae_lambda": 1.0}, "gae_lambda has no effect: it applies to kind ppo, not grpo"),
        ({"kl_reward": {"horizon": 10_000}}, "horizon has no effect: .*set target. Remove it"),
        ({"importance": {}, "old_logprobs": "sampler"}, "set old_logprobs to recomputed"),
        ({"importance": {"low": 0.5}}, "low has no effect: .*applies to mode mask"),
        ({"importance": {"high": 0.5}}, "high"),
        ({"kind": "reinforce++", "divide_by_std": False}, "it applies to kind grpo, not reinforce[+][+]"),
        ({"kind": "rloo", "discount": 0.9}, r"discount has no effect: it applies to kind reinforce[+][+] and ppo, not rloo"),
        ({"kl_reward": {"horizon": 5}}, "horizon has no effect"),
        ({"kl_reward": {"coefficient": 0}}, "kl_reward.coefficient"),
        ({"advantage": "rloo"}, "algorithm.advantage is not a setting. Did you mean algorithm.kind?"),
        ({"kind": "reinforce"}, "algorithm.kind"),
    ],
)
def test_settings_without_effect_are_refused(recipe, algorithm, message):
    with pytest.raises(RecipeError, match=message):
        train_rl(recipe(algorithm=algorithm))


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_groups_of_one_are_refused_by_kinds_that_compare_groups(recipe, kind):
    with pytest.raises(RecipeError, match=rf"rollout.n is 1, but {kind.replace('+', '[+]')} compares the samples of a group"):
        train_rl(recipe(algorithm={"kind": kind}, rollout={"n": 1}))


def test_gdpo_without_normalised_rewards_is_refused(recipe):
    with pytest.raises(
        RecipeError, match="gdpo, which normalises each reward by its group and adds them up: give digits normalise"
    ):
        train_rl(recipe(algorithm={"kind": "gdpo"}), "rewards.1.normalise=none")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resolved_recipe_loads_as_the_same_recipe(recipe, tmp_path, name):
    """It writes out every setting, those without effect as comments."""
    loaded = load(recipe(algorithm=ALGORITHMS[name]))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(loaded))
    assert load(resolved).recipe == loaded.recipe
    assert "# gae_lambda: 1.0 # no effect here" in {" ".join(line.split()) for line in resolved.read_text().splitlines()}
    explained = " ".join(line.strip().lstrip("#").strip() for line in explain(loaded).splitlines())
    assert "No effect here: it applies to kind ppo, not" in explained


def test_doctor_warns_about_unusual_settings(recipe):
    def warnings(**algorithm) -> str:
        loaded = load(recipe(algorithm=algorithm, train=SEVERAL_UPDATES)).recipe
        assert isinstance(loaded, RLRecipe)
        return " ".join(text for _, text in check_algorithm(loaded))

    assert warnings() == warnings(loss="gspo", clip_ratio=[3e-4, 4e-4]) == warnings(loss="cispo") == ""
    assert "GSPO's paper uses [0.0003, 0.0004]" in warnings(loss="gspo")
    assert "only the first of 2 updates per step" in warnings(loss="policy_gradient")


def test_recipe_lines_in_the_docs_are_valid():
    rows = re.findall(r"^\| [^|]+ \| `(\{kind: [^`]+\})`", (REPOSITORY / "docs/algorithms.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    found = [AlgorithmSettings(**yaml.safe_load(row)) for row in rows]
    assert {algorithm.kind for algorithm in found} == set(ESTIMATORS)
    assert {algorithm.loss for algorithm in found} == set(POLICY_LOSSES)
