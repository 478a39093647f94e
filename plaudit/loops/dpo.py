"""Direct preference optimisation.

Each step takes the next pairs, packs them without padding into micro-batches, and moves the model down

    L = (1/P) Σ −log σ( β (h_chosen − h_rejected) ),   h = log π(answer | prompt) − log π_ref(answer | prompt)

over the P pairs of the whole step (or the IPO or hinge loss; plus the chosen answers' SFT loss, if `nll_coefficient` is set).

Differs from the textbook: π_ref is evaluated once, before the first step, and not held in memory during training; the two answers
of a pair share a micro-batch, and the split of a step into micro-batches changes nothing.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.pack import Batches, pair_micro_batches, pair_targets
from plaudit.data.pairs import load_pairs
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.data.token_store import StoredPairs
from plaudit.data.tokenise_workers import Tokeniser
from plaudit.files import text_digest, weights_fingerprint
from plaudit.hub import model_folder
from plaudit.loops.passes import read_rows_with, train_in_passes
from plaudit.models.folder import require_same_tokens
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.preference.losses import answer_logprobs, dpo_loss, dpo_shares, measure
from plaudit.preference.reference import with_reference
from plaudit.recipe import DPORecipe
from plaudit.recipe.training import micro_batch_tokens
from plaudit.report.progress import print_line
from plaudit.run import Run
from plaudit.train.build import build_trainer, divide, plan_training
from plaudit.train.trainer import Loss, compute_repeatably
from plaudit.types import Batch, Pair
from plaudit.world import World


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]], world: World) -> Path:
    """Train the recipe's model on `sources['train']`, validate on `sources['val']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, DPORecipe)
    device = world.device
    if recipe.run.deterministic:
        compute_repeatably(device)
    template = load_model_template(recipe.model, recipe.data.special_tokens)
    files = [source for part in sources.values() for source in part]
    inputs = {"the columns' names": text_digest(repr([source.schema for source in files]))}
    if recipe.reference.path is not None:
        require_same_tokens(
            recipe.reference.path, template.tokenizer, "reference", trust_remote_code=recipe.model.trust_remote_code
        )
        inputs["the reference"] = weights_fingerprint(model_folder(recipe.reference.path))
    with Run(loaded, files, template, inputs, world=world) as run:
        with world.leader_first("tokenised rows"):
            pairs = _pairs("train", sources["train"], template, recipe)
            validation = _pairs("val", sources["val"], template, recipe) if sources["val"] else []

        recipe, sharding, micro_batch = plan_training(recipe, pairs.lengths, world, run.micro_batch)
        run.resolved, run.sharding, run.micro_batch = recipe, sharding, micro_batch
        policy = divide(load_policy(recipe.model, template, device, seed=recipe.seed), sharding, world)
        known = with_reference([*pairs, *validation], recipe, policy, run.folder, world)  # while the policy is untrained
        pairs, validation = known[: len(pairs)], known[len(pairs) :]
        trainer = build_trainer(recipe, policy, sharding, world)

        def update(pairs: list[Pair]) -> tuple[Sequence[Batch], Loss]:
            batches = pair_micro_batches(pairs, micro_batch, device, world.size, share=recipe.train.share_prompts)
            return batches, dpo_loss(policy.model, pairs, recipe.loss)

        check = partial(validate, policy, validation, recipe, world) if validation else None
        return train_in_passes("dpo", run, trainer, pairs, per_step=recipe.train.pairs_per_step, update=update, validate=check)


def validate(
    policy: TrainableModel, pairs: Sequence[Pair], recipe: DPORecipe, world: World, progress: Batches = iter
) -> dict[str, float]:
    """Loss and metrics over all validation pairs."""
    train, micro_batch = recipe.train, micro_batch_tokens(recipe.train.tokens_per_micro_batch)
    logprobs = measure(policy.model, pairs, answer_logprobs, micro_batch, world, progress, share=train.share_prompts)
    num_chosen = sum(pair.chosen.num_targets for pair in pairs)
    loss, others = dpo_shares(logprobs, pair_targets(pairs), recipe.loss, len(pairs), num_chosen)
    return {f"val/{name}": value.item() for name, value in {"loss": loss, **others}.items()}


def _pairs(part: str, sources: list[Source], template: ChatTemplate, recipe: DPORecipe) -> StoredPairs:
    data = recipe.data
    reading = read_rows_with(Tokeniser(recipe.model, data.special_tokens, "turns"), template, sources, f"reading {part} pairs")
    result = load_pairs(sources, max_tokens=data.max_tokens, too_long=data.too_long, equal=data.equal, **reading)
    print_line(f"{part}: {result.summary(data.too_long, data.max_tokens)}")
    return result.pairs
