"""PPO's critic: its loss, its values and its training; it is saved, resumed and checked like the policy."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from plaudit.config import load
from plaudit.data.pack import pack
from plaudit.data.templates import load_model_template
from plaudit.errors import PlauditError, RecipeError, TrainingStopped
from plaudit.models import attention
from plaudit.models.critic import SharedCritic, load_critic, target_values
from plaudit.models.logprobs import target_states
from plaudit.models.scalar import load_scalar
from plaudit.objectives.advantages import StepRewards, gae
from plaudit.objectives.value import clipped_value, explained_variance
from plaudit.recipe import AlgorithmSettings, CriticSettings, KLRewardSettings, LoraSettings, ModelSettings
from plaudit.recipe.reward_models import RewardModel
from plaudit.recipe.rl import CriticOptimSettings
from plaudit.rl.estimators import estimate_advantages, token_rewards
from plaudit.rl.experience import make_update
from plaudit.rl.kl_penalty import KLPenalty
from plaudit.rl.losses import policy_loss, shared_loss, value_loss, value_metrics
from plaudit.train.memory_plan import plan_devices
from plaudit.train.trainer import Loss, Trainer
from plaudit.types import Experience
from plaudit.world import World
from support.experience import batches_of, critic_of, experience, shared_of, update_of, valued_samples
from support.models import make_classifier, with_other_tokens
from support.paths import REFERENCE
from support.recipes import Stopped, rl_recipe, stop_before, train_rl, write_recipe

CPU = torch.device("cpu")
SEVERAL_UPDATES = {"prompts_per_step": 4, "prompts_per_update": 2, "tokens_per_micro_batch": 256}


@pytest.fixture(scope="module", autouse=True)
def prompts_file(relative_prompts) -> Path:
    return relative_prompts


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file, reward_file):
    """Writes a PPO recipe whose run folder has the same name."""

    def write(name: str = "run", reward: Path | dict = reward_file, **sections) -> Path:
        settings = {"algorithm": {"kind": "ppo"}, "critic": {"optim": {"lr": 1e-3}}, "train": SEVERAL_UPDATES} | sections
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, reward, **settings)
        return write_recipe(tmp_path / f"{name}.yaml", {key: value for key, value in tree.items() if value is not None})

    return write


def metrics_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def critic_with_random_head(path: Path, **settings):
    """A critic whose new head is random, not 0."""
    critic = critic_of(path, **settings)
    torch.nn.init.normal_(critic.model.score.weight, generator=torch.Generator().manual_seed(1))  # pyright: ignore
    return critic


# By hand --------------------------------------------------------------------------------------------------------------


def test_gae_of_three_tokens():
    """Reward 1 at the last; V = 0.5, 0.25, 0.75; γ = 0.9, λ = 0.5.
    δ = 0.9·0.25 − 0.5, 0.9·0.75 − 0.25, 1 − 0.75 = −0.275, 0.425, 0.25; A_2 = 0.425 + 0.45·0.25, A_1 = −0.275 + 0.45·A_2."""
    rewards, values = tensor(0, 0, 1)[None], tensor(0.5, 0.25, 0.75)[None]
    A, R = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.5)
    expected = tensor(-0.275 + 0.45 * 0.5375, 0.5375, 0.25)
    torch.testing.assert_close(A[0], expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(R[0], expected + values[0], rtol=0, atol=1e-15)


def test_advantages_are_whitened_and_returns_are_not():
    rewards, values = [tensor(0, 0, 1), tensor(2)], [tensor(0.5, 0.25, 0.75), tensor(1)]
    step = StepRewards(rewards, torch.tensor([1, 1]), values=values)
    A, R = estimate_advantages(step, AlgorithmSettings(kind="ppo"))
    assert R is not None
    # γ = λ = 1: the advantage is the reward minus the value, and the return is the reward.
    raw = np.array([0.5, 0.75, 0.25, 1.0])
    np.testing.assert_allclose(np.concatenate(A), (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-12)
    assert [r.tolist() for r in R] == [[1, 1, 1], [2]]


def test_kl_in_the_reward_is_part_of_the_returns():
    """log π_old − log ref is 1 and 2, β = 0.1: the first token's return is −0.1 − 0.2 + 5, the second's −0.2 + 5."""
    costs, _ = KLPenalty(KLRewardSettings(coefficient=0.1)).costs([np.array([-1.0, -1.0])], [np.array([-2.0, -3.0])])
    step = StepRewards(token_rewards([5.0], [2], costs), torch.tensor([1]), values=[tensor(0, 0)])
    returns = estimate_advantages(step, AlgorithmSettings(kind="ppo")).returns
    assert returns is not None
    np.testing.assert_allclose(returns[0], [4.7, 4.8])


def test_value_loss_by_hand():
    """R = 1, V_old = 0, ε = 0.5. V = 0.8 lies beyond its bound of 0.5: (0.5 − 1)² counts, without gradient. V = −0.2 lies
    within bounds: 1.44. V = −0.7 is further off than its bound of −0.5: 2.89 counts, not 2.25."""
    V = tensor(0.8, -0.2, -0.7).requires_grad_()
    token = clipped_value(V, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), clip=0.5)
    torch.testing.assert_close(token.loss_N.detach(), tensor(0.125, 0.72, 1.445), rtol=0, atol=1e-15)
    assert token.clipped_N.tolist() == [True, False, False]
    [gradient] = torch.autograd.grad(token.loss_N.sum(), V)
    torch.testing.assert_close(gradient, tensor(0.0, -1.2, -1.7), rtol=0, atol=1e-15)
    plain = clipped_value(V, torch.zeros_like(V), torch.ones_like(V), clip=None)
    torch.testing.assert_close(plain.loss_N.detach(), tensor(0.02, 0.72, 1.445), rtol=0, atol=1e-15)
    assert not plain.clipped_N.any()


def test_value_loss_equals_verl():
    reference = json.loads((REFERENCE / "verl_objectives.json").read_text())
    inputs, expected = reference["inputs"], reference["losses"]["value clip=0.5 agg=token-mean"]
    mask = torch.tensor(inputs["response_mask"]).bool()
    V, old, R = (tensor(*np.array(inputs[name])[mask]) for name in ("value_predictions", "values", "value_returns"))
    token = clipped_value(V, old, R, clip=0.5)
    assert token.loss_N.mean().item() == pytest.approx(expected["loss"], abs=1e-9, rel=0)
    assert token.clipped_N.double().mean().item() == pytest.approx(expected["clipfrac"], abs=1e-9, rel=0)
    assert torch.autograd.gradcheck(lambda v: clipped_value(v, old, R, clip=0.5).loss_N, V.requires_grad_())


def test_explained_variance_by_hand():
    R = tensor(0, 2, 4)
    assert explained_variance(R, R) == 1
    assert explained_variance(R + 7, R) == 1, "a constant offset does not matter"
    assert explained_variance(torch.zeros(3, dtype=torch.float64), R) == 0
    assert explained_variance(tensor(0, 1, 2), R) == pytest.approx(0.75)
    assert math.isnan(explained_variance(R, torch.ones(3, dtype=torch.float64)))


# Values of a model ----------------------------------------------------------------------------------------------------


def test_a_value_depends_only_on_what_precedes_its_token(tiny_model):
    critic, samples = critic_with_random_head(tiny_model), valued_samples()
    critic.model.eval()
    with torch.no_grad():
        packed = target_values(critic.model, pack(samples)).split([s.num_targets for s in samples])
        critic.model.set_attn_implementation("eager")
        for sample, values in zip(samples, packed, strict=True):
            tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
            hidden = critic.model.get_decoder()(input_ids=tokens).last_hidden_state
            at = np.flatnonzero(sample.loss_mask) - 1
            torch.testing.assert_close(values, critic.model.score(hidden[0, at])[:, 0], rtol=0, atol=1e-5)  # pyright: ignore
    critic.model.set_attn_implementation(attention.NAME)
    first = replace(samples[1], tokens=np.concatenate([samples[1].tokens[:-1], [7]]).astype(np.int32))
    with torch.no_grad():
        assert torch.equal(target_values(critic.model, pack([first])), target_values(critic.model, pack([samples[1]])))


def gradient_of(modules: Sequence[torch.nn.Module], loss: Loss, samples: list[Experience], budget: int):
    """Loss and gradient of an update, in micro-batches of `budget` tokens."""
    total = 0.0
    for module in modules:
        module.zero_grad()
    for batch in batches_of(update_of(samples), budget):
        share, _ = loss(batch)
        share.backward()
        total += share.item()
    named = [(f"{i} {name}", p) for i, module in enumerate(modules) for name, p in module.named_parameters()]
    return total, {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("shared", [False, True])
def test_split_and_order_do_not_change_the_update(tiny_model, shared):
    if shared:
        policy, head = shared_of(tiny_model)
        modules, settings = [policy.model, head.model], CriticSettings(shared=True, clip_value=0.2)

        def loss_of(samples):
            return shared_loss(policy.model, head, update_of(samples).num_tokens, AlgorithmSettings(kind="ppo"), settings, 0.9)
    else:
        critic = critic_with_random_head(tiny_model)
        modules = [critic.model]

        def loss_of(samples):
            return value_loss(partial(target_values, critic.model), update_of(samples).num_tokens, clip=0.2)

    samples = valued_samples()
    for module in modules:
        module.double()
    total, gradient = gradient_of(modules, loss_of(samples), samples, 10_000)
    for others, budget in ((samples, 1), (samples, 20), (samples[::-1], 10_000)):
        again, other_gradient = gradient_of(modules, loss_of(others), others, budget)
        assert again == pytest.approx(total, rel=1e-7)
        for name, g in gradient.items():
            assert (other_gradient[name] - g).norm() <= 1e-6 * g.norm(), name


# A critic on the policy's layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"lora": LoraSettings(rank=2)}], ids=["full", "lora"])
def test_shared_layers_get_the_weighted_sum_of_both_gradients(tiny_model, settings):
    """∂L = ∂L_policy + c · ∂L_V in the layers, ∂L_V in the head, each as computed separately."""
    policy, head = shared_of(tiny_model, **settings)
    model, samples, algorithm = policy.model, valued_samples(), AlgorithmSettings(kind="ppo", entropy_coefficient=0.01)
    for module in (model, head.model):
        module.double()

    def gradients(loss: Loss):
        return gradient_of([model, head.model], loss, samples, 10_000)[1]

    def values(batch):
        return head.values(target_states(model, batch), coefficient=1.0)

    num_tokens = update_of(samples).num_tokens
    alone = gradients(policy_loss(model, num_tokens, algorithm, 0.9))
    of_values = gradients(value_loss(values, num_tokens, clip=0.5))
    for c in (0.0, 0.25):
        both = gradients(shared_loss(model, head, num_tokens, algorithm, CriticSettings(shared=True, loss_coefficient=c), 0.9))
        assert both.keys() == of_values.keys() | alone.keys()
        for name, gradient in both.items():
            expected = of_values[name] if name == "1 weight" else alone[name] + c * of_values.get(name, 0.0)
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


def test_a_shared_pass_gives_the_losses_of_two_separate_ones(tiny_model):
    policy, head = shared_of(tiny_model)
    update, algorithm = update_of(valued_samples()), AlgorithmSettings(kind="ppo")
    [batch], num_tokens = batches_of(update), update.num_tokens
    both, metrics = shared_loss(policy.model, head, num_tokens, algorithm, CriticSettings(shared=True), 0.9)(batch)
    alone, plain = policy_loss(policy.model, num_tokens, algorithm, 0.9)(batch)
    of_values, _ = value_loss(lambda batch: head.values(target_states(policy.model, batch)), num_tokens, clip=0.5)(batch)
    assert both.item() == pytest.approx(alone.item() + of_values.item())
    assert metrics["loss"] == alone
    assert metrics["critic/loss"] == of_values
    assert all(metrics[name] == plain[name] for name in plain)


def test_a_saved_shared_head_loads_as_reward_model_and_as_critic(tiny_model, tmp_path):
    policy, head = shared_of(tiny_model)
    policy.save(tmp_path / "model")
    head.save(tmp_path / "critic")
    assert [file.name for file in (tmp_path / "critic").iterdir()] == ["value_head.safetensors"]
    shutil.copy(tmp_path / "critic/value_head.safetensors", tmp_path / "model")
    one = experience(np.random.RandomState(0), 9, 1)
    value = head.values(target_states(policy.model.eval(), pack([one]))).item()
    scored = load_scalar(RewardModel(path=str(tmp_path / "model"), dtype="float32"), CPU).score([one.tokens[:-1].tolist()])
    assert scored[0] == pytest.approx(value, abs=1e-5)
    assert torch.equal(SharedCritic(policy, str(tmp_path / "model")).model.weight, head.model.weight)
    own = critic_of(tmp_path / "model")
    own.model.eval()
    assert target_values(own.model, pack([one])).item() == pytest.approx(value, abs=1e-5)


def test_a_critic_can_start_from_a_reward_model(tiny_model, tmp_path):
    folder = make_classifier(tiny_model, tmp_path / "rm")
    critic = critic_of(folder)
    assert torch.equal(critic.model.score.weight, weights_of(folder)["score.weight"])  # pyright: ignore
    tokens = np.arange(3, 12, dtype=np.int32)
    # Its score of a text is the value of the token that follows.
    scored = load_scalar(RewardModel(path=str(folder), dtype="float32"), CPU).score([tokens.tolist()])
    one = replace(experience(np.random.RandomState(0), 9, 1), tokens=np.append(tokens, 3).astype(np.int32))
    critic.model.eval()
    assert target_values(critic.model, pack([one])).item() == pytest.approx(scored[0], abs=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_saved_critic_loads_in_plaudit_and_in_transformers(tiny_models, tmp_path, kind):
    critic = critic_with_random_head(tiny_models[kind])
    critic.save(tmp_path / "critic")
    again = critic_of(tmp_path / "critic")
    assert same(critic.model.state_dict(), again.model.state_dict())
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, plain.config.pad_token_id]])
    scores = plain(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])).logits[:, 0]
    critic.model.eval()
    for row, score in zip(([5, 6, 7, 8], [9, 10, 11]), scores, strict=True):
        one = experience(np.random.RandomState(0), len(row), 1)
        one = replace(one, tokens=np.array([*row, 3], dtype=np.int32))
        assert target_values(critic.model, pack([one])).item() == pytest.approx(score.item(), abs=1e-5)


def test_a_saved_critic_does_not_pad_with_the_end_token(tiny_model, tmp_path):
    """transformers takes the value from the last non-padding token. The policy's own tokenizer is left unchanged."""
    model = ModelSettings(path=str(tiny_model))
    template = load_model_template(model)
    template.tokenizer.pad_token = template.tokenizer.convert_ids_to_tokens(template.end_token)
    load_critic(model, template, CPU).save(tmp_path / "critic")
    saved = AutoTokenizer.from_pretrained(tmp_path / "critic")
    config = AutoConfig.from_pretrained(tmp_path / "critic")
    assert config.pad_token_id == saved.pad_token_id != template.end_token
    assert template.tokenizer.pad_token_id == template.end_token


def test_a_new_head_starts_at_zero(tiny_model):
    assert not target_values(critic_of(tiny_model).model, pack(valued_samples())).any()


def test_the_head_of_a_bf16_critic_is_fp32(tiny_model):
    model = ModelSettings(path=str(tiny_model), dtype="bfloat16")
    critic = load_critic(model, load_model_template(model), CPU)
    assert critic.model.score.weight.dtype == torch.float32  # pyright: ignore
    assert critic.model.dtype == torch.bfloat16
    assert target_values(critic.model, pack(valued_samples())).dtype == torch.float32


def test_lora_trains_adapters_and_head_and_saves_them_merged(tiny_model, tmp_path):
    critic = critic_of(tiny_model, lora=LoraSettings(rank=2))
    trained = {name for name, _ in critic.trainable()}
    assert [name for name in trained if "lora_" not in name] == ["score.modules_to_save.default.weight"]
    samples = valued_samples()
    trainer = Trainer(critic, CriticOptimSettings(lr=1e-2), seed=0, max_skipped_steps=0, world=World.alone())
    for _ in range(2):
        update = update_of(samples)
        loss = value_loss(partial(target_values, critic.model), update.num_tokens, clip=None)
        trainer.update(batches_of(update), loss, 1e-2)
    critic.save(tmp_path / "critic")
    again = critic_of(tmp_path / "critic")
    for one in (critic, again):
        one.model.eval()
    with torch.no_grad():
        before, after = (target_values(one.model, pack(samples)) for one in (critic, again))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)


# Learning -------------------------------------------------------------------------------------------------------------


def test_it_learns_what_the_prompt_predicts(tiny_model):
    """The reward is a function of the prompt's first token; the responses are noise."""
    rng = np.random.RandomState(0)
    critic = critic_of(tiny_model)
    trainer = Trainer(critic, CriticOptimSettings(lr=2e-3), seed=0, max_skipped_steps=0, world=World.alone())
    explained = []
    for _ in range(25):
        samples = []
        for i in range(16):
            one = experience(rng, 3, 4, reward=float(i % 2))
            samples.append(replace(one, tokens=np.concatenate([[10 + i % 2], one.tokens[1:]]).astype(np.int32)))
        critic.model.eval()
        with torch.no_grad():
            values = target_values(critic.model, pack(samples)).split([4] * 16)
        rewards = token_rewards([s.reward for s in samples], [4] * 16)
        step = StepRewards(rewards, torch.tensor([16]), values=[v.double() for v in values])
        returns = estimate_advantages(step, AlgorithmSettings(kind="ppo")).returns
        assert returns is not None
        samples = [replace(s, values=v.numpy(), returns=r) for s, v, r in zip(samples, values, returns, strict=True)]
        explained.append(value_metrics(samples)["critic/explained_variance"])
        update = update_of(samples)
        trainer.update(batches_of(update), value_loss(partial(target_values, critic.model), update.num_tokens, clip=0.5), 2e-3)
    assert explained[0] < 0.2
    assert explained[-1] > 0.9


# Through the full loop ------------------------------------------------------------------------------------------------

CRITIC_METRICS = {
    f"critic/{name}"
    for name in ("loss", "clip_fraction", "explained_variance", "lr", "grad_norm", "value", "return", "skipped_steps")
}


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": {"kind": "ppo", "gae_lambda": 0.95, "discount": 0.99, "kl_reward": {"coefficient": 0.01}}},
        {"model": {"lora": {"rank": 2}}, "algorithm": {"kind": "ppo", "kl_coefficient": 0.01}},
        {"model": {"lora": {"rank": 2}}, "critic": {"lora": {"rank": 2}, "gradient_checkpointing": True, "clip_value": None}},
        {"rollout": {"n": 1}, "model": {"dtype": "bfloat16"}, "critic": {"dtype": "bfloat16"}},
        {"model": {"dtype": "bfloat16"}, "critic": {"shared": True, "optim": {"lr": 1e-3}}},
        {
            "model": {"lora": {"rank": 2}, "gradient_checkpointing": True},
            "critic": {"shared": True, "loss_coefficient": 0.0, "clip_value": None},
            "algorithm": {"kind": "ppo", "kl_reward": {"coefficient": 0.01}},
        },
    ],
    ids=["plain", "gae and kl", "lora policy", "lora critic", "bfloat16, n=1", "shared, bfloat16", "shared, lora, head alone"],
)
def test_two_steps(tmp_path, recipe, tiny_model, settings):
    model = train_rl(recipe(**settings))
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row.keys() >= CRITIC_METRICS
        assert row["grad_norm"] > 0
        assert row["critic/grad_norm"] > 0
    assert not same(weights_of(model), weights_of(tiny_model))
    if settings.get("critic", {}).get("shared"):
        assert weights_of(model).keys() == weights_of(tiny_model).keys(), "a plain causal model"
        [head] = load_file(tmp_path / "run/critic/value_head.safetensors").values()
        assert head.any()
        return
    before, after = weights_of(tiny_model), weights_of(tmp_path / "run/critic")
    assert any(not torch.equal(before[name], after[name]) for name in after.keys() & before.keys())
    assert set(weights_of(tmp_path / "run/checkpoints/step_000002/critic")) == set(after)
    critic_of(tmp_path / "run/critic")


def test_the_critic_trains_on_returns_from_its_own_values(recipe, monkeypatch, tmp_path):
    """γ = λ = 1 and no KL: every token's return is the sample's reward, and A is the whitened reward minus value."""
    updates: list[list[Experience]] = []

    def record(samples, *arguments, **settings):
        updates.append(samples)
        return make_update(samples, *arguments, **settings)

    monkeypatch.setattr("plaudit.rl.learner.make_update", record)
    train_rl(recipe(train={"prompts_per_step": 3, "tokens_per_micro_batch": 256}, run={"max_steps": 1}))
    [samples] = updates
    raw = np.concatenate([sample.reward - sample.values for sample in samples])  # pyright: ignore
    for sample in samples:
        np.testing.assert_allclose(sample.returns, sample.reward, atol=1e-9)  # pyright: ignore
    np.testing.assert_allclose(np.concatenate([s.advantages for s in samples]), (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)
    [row] = metrics_of(tmp_path / "run")
    returns = np.concatenate([s.returns for s in samples])  # pyright: ignore
    assert row["critic/explained_variance"] == pytest.approx(1 - raw.var() / returns.var(), abs=1e-6)
    # One update, so V is still V_old: the loss is half the mean squared error.
    assert row["critic/loss"] == pytest.approx((raw**2).mean() / 2, rel=1e-4)
    assert row["critic/clip_fraction"] == 0


FAILS_ON_SOME = """
def compute_score(solution_str):
    if len(solution_str) % 3 == 0:
        raise ValueError("cannot score this length")
    return len(solution_str)
"""


def test_dropped_samples_are_not_trained_on(recipe, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(FAILS_ON_SOME)
    seen = []
    monkeypatch.setattr("plaudit.rl.learner.value_metrics", lambda samples: seen.extend(samples) or value_metrics(samples))
    reward = {
        "kind": "function",
        "path": str(tmp_path / "reward.py"),
        "workers": 1,
        "limits": {"timeout_s": 60},
        "max_failure_rate": 1.0,
    }
    train_rl(recipe(reward=reward, run={"max_steps": 1}))
    [row] = metrics_of(tmp_path / "run")
    assert 0 < row["dropped"] < 16
    assert len(seen) == 16 - row["dropped"]


@pytest.mark.grid(1)
@pytest.mark.parametrize("shared", [False, True])
def test_warm_up_leaves_the_policy_unchanged(tmp_path, recipe, tiny_model, shared):
    """Bit for bit, while sampling continues; the third step changes it."""
    file = recipe(critic={"shared": shared, "pretrain_steps": 2, "optim": {"lr": 1e-3}},
                  algorithm={"kind": "ppo", "kl_coefficient": 0.1},
                  run={"max_steps": 3, "save_every": 1, "keep_last": 5})  # fmt: skip
    train_rl(file)
    checkpoints = tmp_path / "run/checkpoints"
    policies = [weights_of(checkpoints / f"step_{step:06d}/model") for step in (1, 2, 3)]
    saved = "value_head.safetensors" if shared else "model.safetensors"
    critics = [load_file(checkpoints / f"step_{step:06d}/critic" / saved) for step in (1, 2, 3)]
    assert same(policies[0], weights_of(tiny_model))
    assert same(policies[1], policies[0])
    assert not same(policies[2], policies[1])
    assert not same(critics[1], critics[0])
    rows = metrics_of(tmp_path / "run")
    assert [row["updates"] for row in rows] == [0, 0, 2]
    assert ["loss" in row for row in rows] == [False, False, True]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row.keys() >= CRITIC_METRICS for row in rows)
    samples = [(tmp_path / f"run/samples/train_{step:06d}.parquet").read_bytes() for step in (1, 2)]
    assert samples[0] != samples[1]


@pytest.mark.slow
@pytest.mark.parametrize(("warmup", "shared"), [(0, False), (1, True)])
def test_a_critic_resumes_exactly(tmp_path, recipe, monkeypatch, warmup, shared):
    settings = {
        "critic": {"shared": shared, "pretrain_steps": warmup, "optim": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2}},
        "algorithm": {"kind": "ppo", "gae_lambda": 0.9},
        "run": {"max_steps": 4, "save_every": 1},
    }
    train_rl(recipe("reference", **settings))
    file = recipe("stopped", **settings)
    stop_before(monkeypatch, 4)  # in the second step: at its second update, the critic's
    with pytest.raises(Stopped):
        train_rl(file)
    train_rl(file)
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    assert metrics_of(stopped) == metrics_of(reference)
    last, saved = "checkpoints/step_000004", "value_head.safetensors" if shared else "model.safetensors"
    for name in (
        "model/model.safetensors", f"critic/{saved}", f"{last}/state.json", f"{last}/trainer/00000.safetensors",
        f"{last}/critic_trainer/00000.safetensors", f"{last}/critic/{saved}",
    ):  # fmt: skip
        assert (stopped / name).read_bytes() == (reference / name).read_bytes(), name
    rates = [row["critic/lr"] for row in metrics_of(reference)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
    assert json.loads((reference / last / "state.json").read_text())["critic"] == {"updates": 8, "skipped_steps": 0}


def test_a_non_finite_critic_loss_stops_the_run(recipe, monkeypatch):
    monkeypatch.setattr("plaudit.rl.learner.target_values", lambda model, batch: target_values(model, batch) * math.nan)
    with pytest.raises(TrainingStopped, match=r"the critic's update 1: .* critic.optim and critic.dtype"):
        train_rl(recipe(train={**SEVERAL_UPDATES, "max_skipped_steps": 0}))


# Refused settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"critic": None}, "ppo, which needs a critic: add the section"),
        ({"algorithm": {"kind": "grpo"}}, "which uses no critic: set it to ppo, or remove critic"),
        ({"algorithm": {"kind": "grpo", "gae_lambda": 0.9}, "critic": None}, "gae_lambda has no effect: it applies to kind ppo"),
        ({"algorithm": {"kind": "ppo", "divide_by_std": False}}, "divide_by_std has no effect: it applies to kind grpo, not ppo"),
        ({"algorithm": {"kind": "ppo", "lam": 0.9}}, "Did you mean algorithm.gae_lambda"),
        ({"critic": {"lora": {"merge_on_save": False}}}, "a critic is always saved merged"),
        ({"critic": {"clip_value": 0}}, "critic.clip_value"),
        ({"critic": {"path": "nowhere/at/all"}}, "no such folder"),
        ({"critic": {"loss_coefficient": 0.1}}, "loss_coefficient has no effect: it applies to a shared critic only"),
        ({"critic": {"shared": True, "path": "models/rm"}}, "critic: path has no effect: it applies to a separate critic"),
        ({"critic": {"shared": True, "lora": {"rank": 2}}}, "critic: lora has no effect: it applies to a separate critic"),
        ({"critic": {"shared": True, "dtype": "float32"}}, "critic: dtype has no effect: it applies to a separate critic"),
    ],
)
def test_settings_without_effect_are_refused(recipe, sections, message):
    file = recipe(**{name: value for name, value in sections.items() if value is not None})
    tree = json.loads(file.read_text())
    for name in [name for name, value in sections.items() if value is None]:
        del tree[name]
    with pytest.raises(PlauditError, match=message):
        train_rl(write_recipe(file, tree))


def test_classifiers_with_several_labels_are_refused(recipe, tiny_model, tmp_path):
    with pytest.raises(RecipeError, match="has 3 labels, and a reward model has one, as a critic has"):
        train_rl(recipe(critic={"path": str(make_classifier(tiny_model, tmp_path / "classifier", labels=3))}))


def test_a_critic_with_another_tokenizer_is_refused(recipe, tiny_model, tmp_path):
    """Same size, same shapes, other tokens: nothing else would reveal it."""
    with_other_tokens(tiny_model, tmp_path / "other")
    with pytest.raises(RecipeError, match="its tokenizer differs from the policy's"):
        train_rl(recipe(critic={"path": str(tmp_path / "other")}))


def test_the_critic_is_part_of_a_runs_identity(recipe, tmp_path, tiny_model):
    """Another critic in the same folder is another run."""
    rm = make_classifier(tiny_model, tmp_path / "rm")
    train_rl(recipe(critic={"path": str(rm)}, run={"max_steps": 1}))
    weights = weights_of(rm)
    weights["score.weight"] += 1
    save_file(weights, rm / "model.safetensors", {"format": "pt"})
    with pytest.raises(PlauditError, match="the critic: its content has changed"):
        train_rl(recipe(critic={"path": str(rm)}, run={"max_steps": 1}))


def test_defaults():
    critic = CriticSettings()
    assert critic.model(ModelSettings(path="policy", trust_remote_code=True)).path == "policy"
    assert critic.model(ModelSettings(path="policy", trust_remote_code=True)).trust_remote_code
    assert not CriticSettings(path="other").model(ModelSettings(path="policy", trust_remote_code=True)).trust_remote_code
    assert (critic.optim.lr, critic.optim.schedule, critic.clip_value) == (1e-5, "constant", 0.5)


def test_the_saved_tokenizer_is_the_policys(tmp_path, recipe, tiny_model):
    train_rl(recipe(run={"max_steps": 1}))
    ours, theirs = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (tmp_path / "run/critic", tiny_model))
    assert ours == theirs


# Doctor ---------------------------------------------------------------------------------------------------------------


def test_doctor_checks_the_critic(plaudit, recipe, tiny_model, tmp_path):
    code, out, _ = plaudit("doctor", recipe())
    assert code == 0, out
    assert f"{tiny_model} with a new value head" in " ".join(out.split())
    assert "critic: weights" in out
    assert "critic: moments, masters" in out

    rm = make_classifier(tiny_model, tmp_path / "rm")
    code, out, _ = plaudit("doctor", recipe(critic={"path": str(rm), "pretrain_steps": 2}))
    text = " ".join(out.split())
    assert code == 0
    assert f"{rm} with its own head; the first 2 steps train only the critic" in text
    assert "critic.pretrain_steps is 2 and run.max_steps 2: the policy never trains" in text

    code, out, _ = plaudit("doctor", recipe(critic={"shared": True, "pretrain_steps": 1}))
    text = " ".join(out.split())
    assert code == 0
    assert "head on the policy's own layers: value loss coefficient 0.5; the first 1 steps train only the critic" in text
    assert "critic: weights" not in out

    code, out, _ = plaudit("doctor", recipe(critic={"gradient_checkpointing": 99}))
    assert code == 1
    assert "critic.gradient_checkpointing is 99" in " ".join(out.split())

    with_other_tokens(tiny_model, tmp_path / "other")
    code, out, _ = plaudit("doctor", recipe(critic={"path": str(tmp_path / "other")}))
    assert code == 1
    assert "its tokenizer differs from the policy's" in " ".join(out.split())
    assert "Traceback" not in out
    code, out, _ = plaudit("doctor", recipe(critic={"path": str(tmp_path / "nowhere")}))
    assert code == 1
    assert "no such folder" in " ".join(out.split())


def test_doctors_memory_plan_counts_every_critic_weight(recipe, tiny_model):
    loaded = load(recipe()).recipe
    critic = critic_of(tiny_model)
    needs = {need.name: need.fixed for need in plan_devices(loaded)["cpu"].needs}
    parameters = sum(p.numel() for p in critic.model.parameters())
    assert needs["critic: weights"] == 4 * parameters
    assert needs["critic: moments, masters"] == 8 * parameters
