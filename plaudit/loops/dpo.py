"""Direct preference optimisation.

Each step takes the next pairs, packs them without padding into micro-batches, and moves the model down

    L = (1/P) Σ −log σ( β (h_chosen − h_rejected) ),   h = log π(answer | prompt) − log π_ref(answer | prompt)

over the P pairs of the whole step (or IPO's or the hinge loss; with the chosen answers' SFT loss beside it, if asked).

Differs from the textbook: π_ref is asked once, before the first step, and is not there in training; the two answers of a pair share
a micro-batch, and how a step is split into those changes nothing.
"""

from pathlib import Path

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.pack import pair_micro_batches, pair_targets
from plaudit.data.pairs import load_pairs
from plaudit.data.templates import ChatTemplate, template_of
from plaudit.files import digest_of, sketch
from plaudit.models.folder import require_same_tokens
from plaudit.models.policy import Policy, load_policy, resolve_device
from plaudit.recipe import DPORecipe, PairData
from plaudit.report.progress import StepProgress, counted, say
from plaudit.run import Run
from plaudit.train.preference_loss import answer_logprobs, dpo_loss, dpo_shares, measure
from plaudit.train.reference import with_reference
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Trainer, compute_repeatably
from plaudit.types import Pair


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """Train the recipe's model on `sources['train']`, validate on `sources['val']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, DPORecipe)
    device = resolve_device(recipe.run.device)
    if recipe.run.repeatable:
        compute_repeatably(device)
    template = template_of(recipe.model)
    files = [source for part in sources.values() for source in part]
    inputs = {"the columns' names": digest_of(repr([source.schema for source in files]))}
    if recipe.loss.reference is not None:
        require_same_tokens(
            recipe.loss.reference, template.tokenizer, "reference", trust_remote_code=recipe.model.trust_remote_code
        )
        inputs["the reference"] = sketch(Path(recipe.loss.reference))
    with Run(loaded, [source.path for source in files], template, inputs) as run:
        pairs = _pairs("train", sources["train"], template, recipe.data)
        validation = _pairs("val", sources["val"], template, recipe.data) if sources["val"] else []

        order = RowOrder(len(pairs), per_step=recipe.train.pairs_per_step, epochs=recipe.run.epochs, seed=recipe.seed)
        total_steps = min(order.num_steps, recipe.run.max_steps or order.num_steps)
        policy = load_policy(recipe.model, template, device, seed=recipe.seed)
        known = with_reference([*pairs, *validation], recipe, policy, run.folder)  # as long as the policy is what it starts as
        pairs, validation = known[: len(pairs)], known[len(pairs) :]
        trainer = Trainer(policy, recipe.optim, seed=recipe.seed, max_skipped_steps=recipe.train.max_skipped_steps)
        done = run.resume(trainer)
        if done == total_steps:
            say(f"this run is finished: all {total_steps} steps are done")

        if done == 0 and validation:
            run.log(0, validate(policy, validation, recipe))

        with StepProgress("dpo", total_steps, done) as progress:
            for step in range(done + 1, total_steps + 1):
                batch = [pairs[row] for row in order.rows(step - 1)]
                lr = lr_at(step - 1, total_steps, recipe.optim)
                micro_batches = pair_micro_batches(batch, recipe.train.tokens_per_micro_batch, device)
                metrics = trainer.update(micro_batches, dpo_loss(policy.model, batch, recipe.loss), lr)
                tokens = sum(map(len, batch))
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


def validate(policy: Policy, pairs: list[Pair], recipe: DPORecipe) -> dict[str, float]:
    """The loss and all that is measured beside it, over all validation pairs."""
    logprobs = measure(policy.model, pairs, answer_logprobs, recipe.train.tokens_per_micro_batch)
    num_chosen = sum(pair.chosen.num_targets for pair in pairs)
    loss, others = dpo_shares(logprobs, pair_targets(pairs), recipe.loss, len(pairs), num_chosen)
    return {f"val/{name}": value.item() for name, value in {"loss": loss, **others}.items()}


def _pairs(part: str, sources: list[Source], template: ChatTemplate, data: PairData) -> list[Pair]:
    result = load_pairs(
        sources,
        lambda conversations: template.examples(conversations, "all"),
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        equal=data.equal,
        progress=lambda rows: counted(rows, f"reading {part} pairs"),
    )
    say(f"{part}: {result.summary(data.too_long, data.max_tokens)}")
    return result.pairs
