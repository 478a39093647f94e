"""Supervised fine-tuning.

Each step takes the next rows, packs them without padding into micro-batches, and moves the model down

    L = −(1/N) Σ_t log p(token_t | tokens before it),   over the N tokens of the whole step that an assistant wrote.

Differs from the textbook: N is the whole step's, so splitting it into micro-batches changes nothing; sequences are packed end to
end and never see each other; logits are never held whole.
"""

from pathlib import Path

import torch

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.examples import ExampleSet, load_examples
from plaudit.data.order import RowOrder
from plaudit.data.pack import micro_batches, pack, split_by_tokens
from plaudit.data.templates import ChatTemplate, template_of
from plaudit.files import digest_of
from plaudit.models.logprobs import target_logprobs
from plaudit.models.policy import Policy, load_policy, resolve_device
from plaudit.objectives.supervised import nll
from plaudit.recipe import SFTData, SFTRecipe
from plaudit.report.progress import StepProgress, counted, say
from plaudit.run import Run
from plaudit.train.memory_plan import settle_checkpointing
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Trainer, compute_repeatably
from plaudit.types import Batch, Example


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """Train the recipe's model on `sources['train']`, validate on `sources['val']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, SFTRecipe)
    device = resolve_device(recipe.run.device)
    if recipe.run.repeatable:
        compute_repeatably(device)
    template = template_of(recipe.model)
    files = [source for part in sources.values() for source in part]
    columns = {"the columns' names": digest_of(repr([source.schema for source in files]))}
    with Run(loaded, [source.path for source in files], template, columns) as run:
        examples = _examples("train", sources["train"], template, recipe.data).examples
        validation = _examples("val", sources["val"], template, recipe.data).examples if sources["val"] else []

        order = RowOrder(len(examples), per_step=recipe.train.rows_per_step, epochs=recipe.run.epochs, seed=recipe.seed)
        total_steps = min(order.num_steps, recipe.run.max_steps or order.num_steps)
        settled = settle_checkpointing(recipe)
        policy = load_policy(settled.model, template, device, seed=recipe.seed)
        trainer = Trainer(policy, recipe.optim, seed=recipe.seed, max_skipped_steps=recipe.train.max_skipped_steps)
        done = run.resume(trainer)
        if done == total_steps:
            say(f"this run is finished: all {total_steps} steps are done")

        if done == 0 and validation:
            run.log(0, validate(policy, validation, recipe))

        with StepProgress("sft", total_steps, done) as progress:
            for step in range(done + 1, total_steps + 1):
                rows = [examples[row] for row in order.rows(step - 1)]
                num_targets = sum(row.num_targets for row in rows)

                def loss(batch: Batch, num_targets: int = num_targets) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                    return nll(target_logprobs(policy.model, batch).logprobs_N, num_targets), {}

                lr = lr_at(step - 1, total_steps, recipe.optim)
                metrics = trainer.update(micro_batches(rows, recipe.train.tokens_per_micro_batch, device), loss, lr)
                tokens = sum(map(len, rows))
                metrics |= {"tokens": float(tokens), "epoch": min(step * order.per_step, order.total_rows) / order.num_rows}
                metrics["time/tokens_per_s"] = tokens / metrics["time/update_s"]

                improved = False
                if validation and run.due(recipe.run.validate_every, step, total_steps):
                    metrics |= validate(policy, validation, recipe)
                    improved = run.note_validation(step, metrics)
                progress.update(step, run.log(step, metrics))
                if run.due_to_save(step, total_steps) or (improved and recipe.run.keep_best):
                    run.save(step, trainer)
                run.stop_if_interrupted(step, total_steps, trainer)

        return run.finish(trainer)


@torch.no_grad()
def validate(policy: Policy, examples: list[Example], recipe: SFTRecipe) -> dict[str, float]:
    """Mean loss per token over all validation rows."""
    policy.model.eval()
    total = sum(
        target_logprobs(policy.model, pack([examples[i] for i in group], policy.device)).logprobs_N.double().sum().item()
        for group in split_by_tokens([len(example) for example in examples], recipe.train.tokens_per_micro_batch)
    )
    return {"val/loss": -total / sum(example.num_targets for example in examples)}


def _examples(part: str, sources: list[Source], template: ChatTemplate, data: SFTData) -> ExampleSet:
    result = load_examples(
        sources,
        template,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        train_on=data.train_on,
        progress=lambda rows: counted(rows, f"reading {part} rows"),
    )
    say(f"{part}: {result.summary(data.too_long, data.max_tokens)}")
    return result
