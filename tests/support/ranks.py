"""Runs of several processes, forked and joined as torchrun's would be."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file

from plaudit.servers.process import free_port
from support.processes import MAIN, Command
from support.recipes import exact_metrics


def start_ranks(size: int, *arguments: object, scripts: dict[int, str] | None = None, **more: str) -> list[Command]:
    """The command in `size` processes (one of one, too, is joined). `scripts`: what some ranks run in place of it."""
    shared: Any = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **more,
    }
    return [
        Command(*arguments, script=(scripts or {}).get(rank, MAIN), **shared, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(size)
    ]


def train_with(size: int, stage: str, recipe: Path, *overrides: str) -> None:
    """A whole run of `size` processes; as without a launcher, if that is one."""
    ranks = [Command(stage, recipe, *overrides)] if size == 1 else start_ranks(size, stage, recipe, *overrides)
    ended = [command.ended() for command in ranks]
    assert ended == [0] * size, "\n".join(f"rank {rank}:\n{command.output}" for rank, command in enumerate(ranks))


def differences(
    run: Path, reference: Path, *, relative: float = 1e-6, absolute: float = 1e-6, ignore: tuple[str, ...] = ()
) -> dict:
    """Metrics that differ by more than this, each with its first values. (Differences of log-probs are close to 0.)"""
    ours, theirs, found = exact_metrics(run), exact_metrics(reference), {}
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        for name in row.keys() - set(ignore):
            a, b = (math.nan if value is None else value for value in (row[name], expected[name]))
            if not math.isclose(a, b, rel_tol=relative, abs_tol=absolute) and not (math.isnan(a) and math.isnan(b)):
                found.setdefault(name, (row["step"], a, b))
    return found


def weight_difference(run: Path, reference: Path) -> float:
    """The largest relative difference of any trained weight."""
    worst = 0.0
    for file in reference.glob("*/model.safetensors"):
        ours, theirs = load_file(run / file.relative_to(reference)), load_file(file)
        assert ours.keys() == theirs.keys()
        worst = max(worst, *(((ours[name] - w).norm() / w.norm().clamp(min=1e-6)).item() for name, w in theirs.items()))
    return worst


def samples(run: Path, *, but: tuple[str, ...] = ("mean_logprob", "advantage")) -> dict[str, pa.Table]:
    """All sampled tables, without columns that depend on rounding."""
    return {file.name: pq.read_table(file).drop(list(but)) for file in sorted((run / "samples").glob("*.parquet"))}


def state_of(run: Path, step: int) -> dict:
    return json.loads((run / f"checkpoints/step_{step:06d}/state.json").read_text())
