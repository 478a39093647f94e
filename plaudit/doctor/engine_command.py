"""`plaudit engine-command`: how to start a server that `rollout.server.url` can name."""

from urllib.parse import urlsplit

from plaudit.config import load
from plaudit.errors import RecipeError
from plaudit.options import Overrides, RecipeFile
from plaudit.recipe import RLRecipe
from plaudit.recipe.rollout import SERVED_ENGINES

KEY, PORT = "PLAUDIT_ENGINE_KEY", 8000


def engine_command(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print how to start a server for sampling, on any machine that plaudit can reach (rollout.server.url)."""
    loaded = load(recipe, overrides or ()).recipe
    if not isinstance(loaded, RLRecipe) or loaded.rollout.engine not in SERVED_ENGINES:
        raise RecipeError(f"{recipe}: only an RL recipe with a server as its engine has such a command: set rollout.engine=vllm")
    print(describe(loaded))


def describe(recipe: RLRecipe) -> str:
    import shlex
    from pathlib import Path

    from plaudit.models.devices import resolve_device
    from plaudit.models.trainable import resolve_dtype
    from plaudit.rollout.served.dialect import Launch
    from plaudit.rollout.served.engine import SERVED

    settings, device = recipe.rollout.server, resolve_device(recipe.run.device)
    dialect = SERVED[recipe.rollout.engine].dialect(settings)
    if not dialect.own_calls:
        raise RecipeError(f"rollout.engine {dialect.name} starts its own servers, and joins none that run already")
    urls = settings.url or (f"http://HOST:{PORT}",)
    key = settings.credential or KEY
    dtype = str(resolve_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    rank = None if recipe.model.lora is None else recipe.model.lora.rank
    folder = Path(shlex.quote(recipe.model.path))
    launch = Launch(folder, dtype, None, on_gpu=device.type == "cuda", sleeps=False, lora_rank=rank, host="0.0.0.0")
    environment = dialect.environment(f'"${key}"', {})
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    lines = [
        f"# A key that only this run knows: export {key}=$(openssl rand -hex 32), here and where the servers are started.",
        "# On a machine without plaudit: copy the folders in PYTHONPATH, and the model's, there.",
    ]
    for port in dict.fromkeys((urlsplit(url).port or PORT) if settings.url else PORT for url in urls):
        words = " ".join(dialect.arguments(launch, port, f'"${key}"'))
        lines.append(f"{variables} {dialect.command.package} serve {words}")
    lines.append(f"# In the recipe: rollout: {{engine: {dialect.name}, server: {{url: [{', '.join(urls)}], credential: {key}}}}}")
    return "\n".join(lines)
