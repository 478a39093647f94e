"""Training a Bradley–Terry reward model.

Each step takes the next pairs, packs them without padding into micro-batches, and moves the model down

    L = (1/P) Σ −log σ( r_chosen − r_rejected − margin ) + c (r_chosen + r_rejected)²,   r: the score at a conversation's last token

over the P pairs of the whole step. Conversations are rendered as `scalar_model` renders them when the model is used.

Differs from the textbook: nothing is padded, so nothing depends on the padding token; validation reports calibration as well as
accuracy.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.pack import Batches, pair_micro_batches, pair_targets
from plaudit.data.pairs import load_pairs
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.data.token_store import StoredPairs
from plaudit.data.tokenise_workers import Tokeniser
from plaudit.files import text_digest
from plaudit.loops.passes import read_rows_with, train_in_passes
from plaudit.models.classifier import load_classifier, set_pad_token
from plaudit.models.trainable import TrainableModel
from plaudit.objectives.preference import calibration_error
from plaudit.preference.losses import answer_scores, measure, reward_model_loss, reward_model_shares
from plaudit.recipe import RewardModelRecipe
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
    assert isinstance(recipe, RewardModelRecipe)
    device = world.device
    if recipe.run.deterministic:
        compute_repeatably(device)
    template = load_model_template(recipe.model, recipe.data.special_tokens)
    files = [source for part in sources.values() for source in part]
    columns = {"the columns' names": text_digest(repr([source.schema for source in files]))}
    with Run(loaded, files, template, columns, world=world) as run:
        with world.leader_first("tokenised rows"):
            pairs = _pairs("train", sources["train"], template, recipe)
            validation = _pairs("val", sources["val"], template, recipe) if sources["val"] else []

        recipe, sharding, micro_batch = plan_training(recipe, pairs.lengths, world, run.micro_batch)
        run.resolved, run.sharding, run.micro_batch = recipe, sharding, micro_batch
        classifier = divide(load_classifier(recipe.model, template, device, seed=recipe.seed), sharding, world)
        sides = (side for pair in chain(pairs, validation) for side in (pair.chosen, pair.rejected))
        set_pad_token(classifier, (int(side.tokens[-1]) for side in sides))
        trainer = build_trainer(recipe, classifier, sharding, world)

        def update(pairs: list[Pair]) -> tuple[Sequence[Batch], Loss]:
            batches = pair_micro_batches(pairs, micro_batch, device, world.size, share=recipe.train.share_prompts)
            return batches, reward_model_loss(classifier.model, pairs, recipe.loss)

        check = partial(validate, classifier, validation, recipe, world) if validation else None
        return train_in_passes(
            "reward-model", run, trainer, pairs, per_step=recipe.train.pairs_per_step, update=update, validate=check
        )


def validate(
    classifier: TrainableModel, pairs: Sequence[Pair], recipe: RewardModelRecipe, world: World, progress: Batches = iter
) -> dict[str, float]:
    """Over all validation pairs: loss, accuracy, margin and calibration error."""
    train, micro_batch = recipe.train, micro_batch_tokens(recipe.train.tokens_per_micro_batch)
    chosen, rejected = scores = measure(
        classifier.model, pairs, answer_scores, micro_batch, world, progress, share=train.share_prompts
    )
    loss, others = reward_model_shares(scores, pair_targets(pairs), recipe.loss, len(pairs))
    measured = {"loss": loss, **others, "calibration_error": calibration_error(chosen - rejected)}
    return {f"val/{name}": value.item() for name, value in measured.items()}


def _pairs(part: str, sources: list[Source], template: ChatTemplate, recipe: RewardModelRecipe) -> StoredPairs:
    data = recipe.data
    reading = read_rows_with(Tokeniser(recipe.model, data.special_tokens, "transcript"), template, sources, f"reading {part} pairs")
    result = load_pairs(
        sources, max_tokens=data.max_tokens, too_long=data.too_long, equal=data.equal, margin_column=data.margin_column, **reading
    )
    print_line(f"{part}: {result.summary(data.too_long, data.max_tokens)}")
    return result.pairs
