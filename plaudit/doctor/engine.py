"""What samples: whether the engine can be started, or reached, with this recipe."""

import os
from collections.abc import Iterator

import torch

from plaudit.doctor.findings import Finding
from plaudit.recipe import RLRecipe
from plaudit.recipe.rollout import SERVED_ENGINES, EngineServerSettings
from plaudit.response_files import STOP, response_file, stop_strings
from plaudit.rl.collect import check_capabilities, require_lag_possible
from plaudit.rollout.build import engine_class
from plaudit.rollout.served.engine import SERVED
from plaudit.train.processes import Processes


def check_engine(recipe: RLRecipe, processes: Processes) -> Iterator[Finding]:
    engine = recipe.rollout.engine
    require_lag_possible(recipe, processes.device(recipe.run.device))
    for warning in check_capabilities(engine_class(engine).capabilities, recipe):
        yield "!", warning
    if recipe.rollout.stop is None and (stops := stop_strings(recipe.model.path, None)):
        yield "✓", f"responses also end with {', '.join(map(repr, stops))}: {response_file(recipe.model.path, STOP)}"
    if engine in SERVED_ENGINES:
        yield from _server(recipe, processes)
    elif engine != "native":
        yield "✓", f"{engine}. The memory below is the native engine's: this one's is not known"


def _server(recipe: RLRecipe, processes: Processes) -> Iterator[Finding]:
    settings = recipe.rollout.server
    dialect = SERVED[recipe.rollout.engine].dialect(settings)  # which refuses what its servers cannot do
    if settings.url and not dialect.own_calls:
        yield "✗", f"rollout.server.url: rollout.engine {dialect.name} starts its own servers; remove url"
        return
    if settings.url:
        yield from _running(settings)
        return
    command = dialect.command
    if problem := command.find_problem(settings.program, "rollout.server.program"):
        yield "✗", problem
    else:
        version = command.find_version(settings.program)
        yield "✓", f"{command.title} {version or '(version not known)'}, started for each process that trains"
    if settings.gpus:
        yield from _own_gpus(settings, processes)
    elif settings.tensor_parallel > 1 and processes.size > 1:
        problem = f"rollout.server.tensor_parallel is {settings.tensor_parallel}, and each of {processes.size} processes has a GPU"
        yield "✗", f"{problem}: set rollout.server.gpus to GPUs that are the servers' alone"


def _running(settings: EngineServerSettings) -> Iterator[Finding]:
    if settings.credential is None:
        yield "✗", "rollout.server.url needs rollout.server.credential: the name of the environment variable with the servers' key"
    elif not os.environ.get(settings.credential):
        yield "✗", f"rollout.server.credential: the environment variable {settings.credential} is not set"
    else:
        yield "✓", f"{len(settings.url)} servers that run already; they are queried when training starts"


def _own_gpus(settings: EngineServerSettings, processes: Processes) -> Iterator[Finding]:
    servers = len(settings.gpus) // settings.tensor_parallel
    if servers != processes.per_machine:
        needed = settings.tensor_parallel * processes.per_machine
        yield "✗", f"rollout.server.gpus names {len(settings.gpus)} GPUs; {processes.per_machine} processes need {needed}"
    if trained := sorted(set(settings.gpus) & set(range(processes.per_machine))):
        yield "✗", f"rollout.server.gpus: the trainer uses GPU {trained[0]} too (cluster.gpus): name others"
    here = torch.cuda.device_count()
    if here and processes.kind is None and max(settings.gpus) >= here:
        yield "✗", f"rollout.server.gpus: GPU {max(settings.gpus)} does not exist, there are {here}"
