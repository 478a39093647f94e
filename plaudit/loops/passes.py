"""Training in passes over a fixed data set: what SFT, DPO and reward models share.

Each step makes one update on the next rows of a seeded order, and validates and saves when due.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.pack import Batches
from plaudit.data.templates import ChatTemplate
from plaudit.data.token_cache import TokenCache, template_inputs
from plaudit.data.tokenise_workers import Tokenise, Tokeniser, Workers, worker_count
from plaudit.report.activity import Activity
from plaudit.report.progress import StepProgress, print_line, show_progress
from plaudit.run import Run
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Loss, Trainer
from plaudit.types import Batch, Example, Pair

Row = TypeVar("Row", Example, Pair)


class ReadRows(TypedDict):
    """How the rows of a data set become tokens: arguments of load_examples and load_pairs."""

    tokenise: Tokenise
    workers: Callable[[], Workers]
    cache: TokenCache
    progress: Callable[[Iterable[Any]], Iterable[Any]]


def read_rows_with(tokeniser: Tokeniser, template: ChatTemplate, sources: Sequence[Source], label: str) -> ReadRows:
    """In worker processes if there are many rows, and then once for all starts."""
    tokenise = tokeniser.build(template)
    count = worker_count(sum(source.num_bytes() for source in sources))
    inputs = template_inputs(template)
    settings = [tokeniser.form, tokeniser.train_on, tokeniser.special_tokens]
    return {
        "tokenise": tokenise,
        "workers": partial(Workers, tokenise, tokeniser, count, print_line),
        "cache": TokenCache(settings, print_line, max_bytes=0) if inputs is None else TokenCache([*inputs, *settings], print_line),
        "progress": lambda rows: show_progress(rows, label),
    }


def train_in_passes(
    verb: str,
    run: Run,
    trainer: Trainer,
    rows: Sequence[Row],
    *,
    per_step: int,
    update: Callable[[list[Row]], tuple[Sequence[Batch], Loss]],
    validate: Callable[[Batches], dict[str, float]] | None,
) -> Path:
    """Runs all remaining steps; returns the trained model's folder. `update` turns a step's rows into micro-batches and a loss;
    `validate` passes its batches through its argument."""
    recipe, settings = run.recipe, run.recipe.run
    order = RowOrder(len(rows), per_step=per_step, epochs=settings.epochs, seed=recipe.seed, last_batch=recipe.train.last_batch)
    total_steps = order.steps(settings.max_steps)
    if early := order.ends_early(settings.max_steps):
        print_line(early, "yellow")
    done = run.resume(trainer)
    if done == total_steps:
        print_line(f"this run is finished: all {total_steps} steps are done")
    heartbeat = trainer.world.heartbeat
    activity = Activity(heartbeat.beat)
    counted = partial(activity.batches, label="validation", unit="rows")

    with StepProgress(verb, total_steps, done, validate_every=settings.validate_every, activity=activity) as progress:
        if done == 0 and validate is not None and settings.validate_first:
            heartbeat.beat("validation before training")
            progress.update(0, run.log(0, _timed(validate, counted)))
        for step in range(done + 1, total_steps + 1):
            heartbeat.beat(f"step {step}, training")
            step_rows = [rows[row] for row in order.rows(step - 1)]
            batches, loss = update(step_rows)
            metrics = trainer.update(batches, loss, lr_at(step - 1, total_steps, recipe.optim))
            tokens = sum(map(len, step_rows))
            metrics |= {"tokens": float(tokens), "epoch": min(step * order.per_step, order.total_rows) / order.rows_per_epoch}
            metrics["time/tokens_per_s"] = tokens / metrics["time/update_s"]

            improved = False
            if validate is not None and run.due(settings.validate_every, step, total_steps):
                heartbeat.beat(f"validation after step {step}")
                metrics |= _timed(validate, counted)
                improved = run.note_validation(step, metrics)
            progress.update(step, run.log(step, metrics))
            if run.due_to_save(step, total_steps) or (improved and settings.keep_best):
                run.save(step)
            run.stop_if_interrupted(step, total_steps)

    return run.finish()


def _timed(validate: Callable[[Batches], dict[str, float]], counted: Batches) -> dict[str, float]:
    began = time.perf_counter()
    return {**validate(counted), "time/validate_s": time.perf_counter() - began}
