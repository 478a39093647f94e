"""Supervised fine-tuning.

Each step takes the next rows, packs them without padding into micro-batches, and moves the model down

    L = −(1/N) Σ_t log p(token_t | tokens before it),   over the N assistant tokens of the whole step.

Differs from the textbook: N is the whole step's, so the split into micro-batches changes nothing; sequences are packed end to end
and cannot attend to each other; the full logits are never materialised.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.examples import ExampleSet, load_examples
from plaudit.data.pack import Batches, micro_batches, pack, split_by_tokens
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.data.tokenise_workers import Tokeniser
from plaudit.files import text_digest
from plaudit.loops.passes import read_rows_with, train_in_passes
from plaudit.models.logprobs import target_logprobs
from plaudit.models.sharded import is_sharded
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.objectives.supervised import nll
from plaudit.recipe import SFTRecipe
from plaudit.recipe.training import micro_batch_tokens
from plaudit.report.progress import print_line
from plaudit.response_files import CLOSE, LONGCOT, have_thoughts, longcot_of_think_tags, read_longcot_config, response_file
from plaudit.run import Run
from plaudit.train.build import build_trainer, divide, plan_training
from plaudit.train.trainer import Loss, compute_repeatably
from plaudit.types import Batch, Example
from plaudit.world import World

THOUGHT_ROWS = 200
"""Rows that are looked at for thoughts."""


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]], world: World) -> Path:
    """Train the recipe's model on `sources['train']`, validate on `sources['val']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, SFTRecipe)
    device = world.device
    if recipe.run.deterministic:
        compute_repeatably(device)
    template = load_model_template(recipe.model, recipe.data.special_tokens)
    files = [source for part in sources.values() for source in part]
    columns = {"the columns' names": text_digest(repr([source.schema for source in files]))}
    with Run(loaded, files, template, columns, world=world) as run:
        with world.leader_first("tokenised rows"):
            examples = _examples("train", sources["train"], template, recipe).examples
            validation = _examples("val", sources["val"], template, recipe).examples if sources["val"] else []

        recipe, sharding, micro_batch = plan_training(recipe, examples.lengths, world, run.micro_batch)
        run.resolved, run.sharding, run.micro_batch = recipe, sharding, micro_batch
        policy = divide(load_policy(recipe.model, template, device, seed=recipe.seed), sharding, world)
        _note_thoughts(policy, examples, recipe.model.path)
        trainer = build_trainer(recipe, policy, sharding, world)

        def update(rows: list[Example]) -> tuple[Sequence[Batch], Loss]:
            num_targets = sum(row.num_targets for row in rows)

            def loss(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                return nll(target_logprobs(policy.model, batch).logprobs_N, num_targets), {}

            return micro_batches(rows, micro_batch, device, world.size), loss

        check = partial(validate, policy, validation, recipe, world) if validation else None
        return train_in_passes("sft", run, trainer, examples, per_step=recipe.train.rows_per_step, update=update, validate=check)


@torch.no_grad()
def validate(
    policy: TrainableModel, examples: Sequence[Example], recipe: SFTRecipe, world: World, progress: Batches = iter
) -> dict[str, float]:
    """Mean loss per token over all validation rows."""
    policy.model.eval()
    micro_batch = micro_batch_tokens(recipe.train.tokens_per_micro_batch)
    batches = split_by_tokens([len(example) for example in examples], micro_batch, world.size)
    own = {
        batch[0]: target_logprobs(policy.model, pack([examples[i] for i in batch], policy.device)).logprobs_N.double().sum().item()
        for batch in progress([batch for _, batch in world.shard(batches, equal=is_sharded(policy.model))])
    }
    totals = {first: total for theirs in world.gather(own, "a validation") for first, total in theirs.items()}
    return {"val/loss": -sum(totals[batch[0]] for batch in batches) / sum(example.num_targets for example in examples)}


def _note_thoughts(policy: TrainableModel, examples: Sequence[Example], path: str) -> None:
    """A model that is trained on thoughts says where they end, for the stages after this one (plaudit/response_files.py)."""
    some = examples[:: max(1, len(examples) // THOUGHT_ROWS)]
    texts = [str(policy.template.tokenizer.decode(example.tokens[example.loss_mask])) for example in some]
    if LONGCOT not in policy.response_files:
        if have_thoughts(texts):
            policy.response_files[LONGCOT] = longcot_of_think_tags()
            print_line(f"most rows have thoughts, so the trained model gets a {LONGCOT}: they end with {CLOSE}")
        return
    file = response_file(path, LONGCOT)
    start = read_longcot_config(file).start
    if start is not None and not any(start in text for text in texts):
        print_line(f"{file} says that thoughts end with {start}, which no row has: correct it, or delete it", "yellow")


def _examples(part: str, sources: list[Source], template: ChatTemplate, recipe: SFTRecipe) -> ExampleSet:
    data = recipe.data
    tokeniser = Tokeniser(recipe.model, data.special_tokens, "turns", data.train_on)
    reading = read_rows_with(tokeniser, template, sources, f"reading {part} rows")
    result = load_examples(sources, max_tokens=data.max_tokens, too_long=data.too_long, **reading)
    print_line(f"{part}: {result.summary(data.too_long, data.max_tokens)}")
    return result
