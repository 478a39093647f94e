"""The learner: models, optimisers and updates of an RL step.

`learn` takes a step's scored groups and returns metrics: plain data in, floats out, nothing printed. It writes no files but its
own state, into the folder it is given.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from plaudit.checkpoint import Snapshot
from plaudit.data.templates import ChatTemplate
from plaudit.errors import TrainingStopped
from plaudit.models.critic import SharedCritic, load_critic, target_values
from plaudit.models.logprobs import state_logprobs, target_states
from plaudit.models.memory import Sharding
from plaudit.models.reference import Reference
from plaudit.models.sharded import bytes_on_device, run_in_pass
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.models.weights import OffloadedModule, has_device_memory
from plaudit.objectives.advantages import StepRewards
from plaudit.recipe import RLRecipe
from plaudit.recipe.training import micro_batch_tokens
from plaudit.rl.estimators import estimate_advantages, token_rewards
from plaudit.rl.experience import PackedSequences, StepSamples, Update, make_update, update_schedule
from plaudit.rl.kl_penalty import KLPenalty
from plaudit.rl.losses import policy_loss, shared_loss, value_loss, value_metrics
from plaudit.rollout.engine import Weights
from plaudit.train.build import build_trainer, divide
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Loss, Trainer
from plaudit.types import Batch, Example, Experience, ScoredGroup
from plaudit.world import World


class Learner:
    """A policy being trained, with its critic, reference and KL penalty if the recipe has them."""

    def __init__(
        self,
        policy: TrainableModel,
        recipe: RLRecipe,
        *,
        total_steps: int,
        world: World,
        sharding: Sharding = "none",
        reference: Reference | None = None,
        critic: TrainableModel | SharedCritic | None = None,
    ):
        self.recipe, self.total_steps, self.world = recipe, total_steps, world
        self.policy, self.reference = policy, reference
        self.penalty = KLPenalty(recipe.algorithm.kl_reward) if recipe.algorithm.kl_reward is not None else None
        self.trainer = build_trainer(recipe, policy, sharding, world)
        self.critic: Trainer | None = None
        self.shared_critic = critic if isinstance(critic, SharedCritic) else None
        self._offloaded_critic: OffloadedModule | None = None
        self.experiences: list[Experience] = []
        """What the last step was trained on; none if it failed before that was known."""
        if critic is not None:
            assert recipe.critic is not None
            self.critic = self.trainer.sibling(critic, recipe.critic.optim, "critic")
            # Of a sharded critic a process has a small part only, which stays.
            if recipe.critic.placement == "offload" and has_device_memory(world.device) and sharding != "full":
                self._offloaded_critic = OffloadedModule(critic.model, world.device)

    @classmethod
    def build(
        cls, recipe: RLRecipe, template: ChatTemplate, *, total_steps: int, world: World, sharding: Sharding = "none"
    ) -> Self:
        """The recipe's models, loaded onto the world's device."""
        policy = divide(load_policy(recipe.model, template, world.device, seed=recipe.seed), sharding, world)
        reference = None
        if recipe.algorithm.needs_reference:
            offload = recipe.reference.placement == "offload"
            shard_among = world if sharding == "full" else None
            reference = Reference(recipe.model, policy, path=recipe.reference.path, offload=offload, shard_among=shard_among)
        critic = None
        if recipe.critic is not None and recipe.critic.shared:
            critic = SharedCritic(policy, recipe.model.path)
        elif recipe.critic is not None:
            critic_settings = recipe.critic.model(recipe.model)
            critic = divide(load_critic(critic_settings, template, world.device, seed=recipe.seed), sharding, world)
        return cls(
            policy, recipe, total_steps=total_steps, world=world, sharding=sharding, reference=reference, critic=critic
        )  # fmt: skip

    def resident_bytes(self, sampled: nn.Module) -> int:
        """Device memory that is taken while this model is sampled, besides its weights."""
        size = self.trainer.optimiser.resident_bytes + (self.reference.bytes if self.reference is not None else 0)
        if self.critic is not None:
            size += self.critic.optimiser.resident_bytes
            if self._offloaded_critic is None:
                size += bytes_on_device(self.critic.trained.model)
        if sampled is not self.policy.model:  # but a copy of it
            size += bytes_on_device(self.policy.model)
        return size

    @property
    def configs(self) -> dict[str, PretrainedConfig]:
        """Of the models that see complete sequences, by a name for messages; the policy's comes first."""
        models = {"the model": self.policy.model}
        if self.critic is not None and self.shared_critic is None:
            models["the critic"] = self.critic.trained.model  # pyright: ignore (a PreTrainedModel)
        return {name: model.config for name, model in models.items()}

    def weights(self) -> Weights:
        """The policy's current weights, for an engine."""
        return Weights(self.policy.model)

    # A step ----------------------------------------------------------------------------------------------------------

    def learn(self, groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
        """All updates of a step; returns their metrics, averaged."""
        self.world.heartbeat.beat(f"step {step}, training")
        self.experiences = []
        with self._critic_on_device():
            began = time.perf_counter()
            samples = StepSamples.from_groups(groups)
            packed = self._packed(samples.sequences)
            experiences, metrics = self._experiences(samples, self._predictions(samples, packed, frozen=self._frozen(step)))
            self.experiences = experiences
            prepared = time.perf_counter()
            metrics |= self._update_all(experiences, samples.sizes, packed, step)
            if self.critic is not None:
                metrics |= value_metrics(experiences)
            metrics |= {"updates": float(self.trainer.updates), "skipped_steps": float(self.trainer.skipped_steps)}
            return metrics | {"time/logprobs_s": prepared - began, "time/update_s": time.perf_counter() - prepared}

    def _packed(self, sequences: Sequence[Example]) -> PackedSequences:
        train = self.recipe.train
        return PackedSequences(sequences, micro_batch_tokens(train.tokens_per_micro_batch), self.world, share=train.share_prompts)

    def _frozen(self, step: int) -> bool:
        """Whether only the critic is trained in this step."""
        return self.recipe.critic is not None and step <= self.recipe.critic.pretrain_steps

    def _predictions(self, samples: StepSamples, packed: PackedSequences, *, frozen: bool) -> dict[str, list[np.ndarray]]:
        """Log-probs and values of the models as they are before the step's updates."""
        algorithm, temperature = self.recipe.algorithm, self.recipe.rollout.temperature
        model, shared, reference = self.policy.model, self.shared_critic, self.reference
        penalised, equal = self.penalty is not None, self.trainer.sharding == "full"
        several_updates = self.recipe.train.updates_per_step > 1 and not frozen
        recompute_old = algorithm.old_logprobs == "recomputed" and (several_updates or penalised)

        @torch.no_grad()
        def policy_forward(batch: Batch) -> dict[str, torch.Tensor]:
            model.eval()
            return run_in_pass(model, policy_outputs, batch)

        def policy_outputs(batch: Batch) -> dict[str, torch.Tensor]:
            hidden_ND = target_states(model, batch)
            outputs: dict[str, torch.Tensor] = {}
            if recompute_old:
                entropy = "value" if self.recipe.run.keep_tokens else "none"
                old = state_logprobs(model, hidden_ND, batch, temperature=temperature, entropy=entropy)
                outputs["old_logprobs"] = old.logprobs_N
                if old.entropy_N is not None:
                    outputs["entropies"] = old.entropy_N
            if shared is not None:
                outputs["values"] = shared.values(hidden_ND)
            return outputs

        predictions: dict[str, list[np.ndarray]] = {}
        if algorithm.old_logprobs == "sampler":
            predictions["old_logprobs"] = samples.sampler_logprobs
        if recompute_old or shared is not None:
            predictions |= packed.predict(policy_forward, equal=equal)
        if reference is not None and (penalised or not frozen):
            with reference.on_device():
                predictions |= packed.predict(lambda batch: {"ref_logprobs": reference.logprobs(batch, temperature)}, equal=equal)
        if self.critic is not None and shared is None:
            predictions |= packed.predict(self._critic_forward, equal=equal)
        return predictions

    @torch.no_grad()
    def _critic_forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert self.critic is not None
        critic = self.critic.trained.model
        critic.eval()
        return {"values": target_values(critic, batch)}

    def _experiences(
        self, samples: StepSamples, predictions: Mapping[str, list[np.ndarray]]
    ) -> tuple[list[Experience], dict[str, float]]:
        """The samples with their advantages and all that was predicted for them; and the KL penalty's metrics."""
        costs, metrics = None, {}
        if self.penalty is not None:
            costs, metrics = self.penalty.costs(predictions.get("old_logprobs", []), predictions.get("ref_logprobs", []))
        if not samples.sequences:
            return [], metrics
        values = predictions.get("values")
        step = StepRewards(
            token_rewards(samples.rewards, samples.lengths, costs),
            torch.tensor(samples.sizes),
            torch.tensor([np.nan if r is None else r for r in samples.greedy_rewards], dtype=torch.float64)
            if samples.greedy_rewards
            else None,
            None if values is None else [torch.from_numpy(of_sample.astype(np.float64)) for of_sample in values],
        )
        advantages, returns = estimate_advantages(step, self.recipe.algorithm)

        def field(name: str, i: int) -> np.ndarray | None:
            return predictions[name][i] if name in predictions else None

        experiences = [
            Experience(
                sequence.tokens,
                sequence.loss_mask,
                reward=samples.rewards[i],
                advantages=advantages[i],
                sampler_logprobs=samples.sampler_logprobs[i],
                old_logprobs=field("old_logprobs", i),
                ref_logprobs=field("ref_logprobs", i),
                values=field("values", i),
                returns=None if returns is None else returns[i],
                entropies=field("entropies", i),
            )
            for i, sequence in enumerate(samples.sequences)
        ]
        return experiences, metrics

    def _update_all(
        self, experiences: Sequence[Experience], sizes: Sequence[int], packed: PackedSequences, step: int
    ) -> dict[str, float]:
        recipe, critic, shared = self.recipe, self.critic, self.shared_critic
        lr = lr_at(step - 1, self.total_steps, recipe.optim)
        frozen, results, critic_results = self._frozen(step), [], []
        for indices in update_schedule(sizes, recipe.train, seed=recipe.seed, step=step):
            everything = len(indices) == len(experiences)
            update = make_update(
                experiences if everything else [experiences[i] for i in indices], recipe.algorithm,
                horizon=recipe.rollout.max_new_tokens,
            )  # fmt: skip
            batches = self._micro_batches(update, packed if everything else self._packed(update.samples))
            if critic is not None and (shared is None or frozen):
                critic_results.append(self._update_critic(update, batches, step))
            if not frozen:
                results.append(self.trainer.update(batches, self._loss(update), lr))
            if critic is not None and shared is not None and not frozen:
                # The head's gradients came with the policy's pass: there is no further batch.
                critic_results.append(self._update_critic(update, (), step))
        # Until the first update the trainer has the sampler's weights, or those that are `rollout.lag` steps newer.
        mismatch = {name: results[0][name] for name in ("mismatch", "mismatch_kl") if results}
        return _averaged(critic_results) | _averaged(results) | mismatch

    def _micro_batches(self, update: Update, packed: PackedSequences) -> Sequence[Batch]:
        """Samples whose advantages are 0, as in a group of equal rewards, apart from the others: they need no backward pass."""
        silent, others = update.by_signal()
        if not (self._only_advantages_count and silent.samples and others.samples):
            return update.micro_batches(packed)
        without = silent.micro_batches(self._packed(silent.samples), has_signal=False)
        return without + others.micro_batches(self._packed(others.samples))

    @property
    def _only_advantages_count(self) -> bool:
        """Whether a sample without advantages has no gradient. Processes that share all weights make each pass together, and so of
        the same kind."""
        algorithm = self.recipe.resolved_algorithm
        other_terms = algorithm.kl_coefficient or algorithm.entropy_coefficient or self.critic is not None
        return not other_terms and self.trainer.sharding != "full"

    def _loss(self, update: Update) -> Loss:
        recipe, model, temperature = self.recipe, self.policy.model, self.recipe.rollout.temperature
        if self.shared_critic is None:
            return policy_loss(model, update.num_tokens, recipe.resolved_algorithm, temperature)
        assert recipe.critic is not None
        return shared_loss(model, self.shared_critic, update.num_tokens, recipe.resolved_algorithm, recipe.critic, temperature)

    def _update_critic(self, update: Update, batches: Sequence[Batch], step: int) -> dict[str, float]:
        """One update of the critic; its metrics, under `critic/`. Layers shared with the policy are left as they are."""
        settings, critic = self.recipe.critic, self.critic
        assert settings is not None
        assert critic is not None

        def values(batch: Batch) -> torch.Tensor:
            if self.shared_critic is None:
                return target_values(critic.trained.model, batch)
            with torch.no_grad():
                hidden_ND = target_states(self.policy.model, batch)
            return self.shared_critic.values(hidden_ND)

        try:
            lr = lr_at(step - 1, self.total_steps, settings.optim)
            metrics = critic.update(batches, value_loss(values, update.num_tokens, clip=settings.clip_value), lr)
        except TrainingStopped as error:
            dtype = "model.dtype" if settings.shared else "critic.dtype"
            raise TrainingStopped(f"the critic's {error} (Its settings are critic.optim and {dtype}.)") from None
        return {f"critic/{name}": value for name, value in metrics.items() if not name.startswith("time/")}

    def _critic_on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._offloaded_critic is None else self._offloaded_critic.on_device()

    # Checkpoints (a `checkpoint.Saveable`) ---------------------------------------------------------------------------

    @property
    def _trainers(self) -> list[Trainer]:
        return [self.trainer] if self.critic is None else [self.trainer, self.critic]

    def state_bytes(self) -> int:
        return sum(trainer.state_bytes() for trainer in self._trainers)

    def snapshot(self, *, copy: bool) -> Snapshot:
        parts = [trainer.snapshot(copy=copy) for trainer in self._trainers]
        state = dict(parts[0].state)
        if self.critic is not None:
            state["critic"] = parts[1].state
        if self.penalty is not None:
            state["kl_penalty"] = self.penalty.state()
        return Snapshot(state, lambda folder: [file for part in parts for file in part.write(folder)])

    def load_state(self, folder: Path, state: dict[str, Any]) -> None:
        self.trainer.load_state(folder, state)
        if self.critic is not None:
            with self._critic_on_device():
                self.critic.load_state(folder, state["critic"])
        if self.penalty is not None:
            self.penalty.load_state(state.get("kl_penalty", {}))

    def models(self) -> Mapping[str, Callable[[Path | None], None]]:
        return {name: save for trainer in reversed(self._trainers) for name, save in trainer.models().items()}


def _averaged(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over a step's updates."""
    return {name: sum(result[name] for result in results) / len(results) for name in (results[0] if results else ())}
