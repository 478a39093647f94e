"""Plaudit trains language models with reward models.

    import plaudit

    run = plaudit.rl("recipes/smollm2/grpo.yaml", optim={"lr": 1e-5})
    run.metrics, run.samples(step=10), run.model

Everything here is loaded when it is first used, so that `import plaudit` is fast; docs/python_api.md shows all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plaudit.host import use_huge_pages
from plaudit.threads import let_threads_sleep

if TYPE_CHECKING:
    from plaudit.api import dpo, load_run, reward_model, rl, sample, sft
    from plaudit.errors import PlauditError
    from plaudit.run_folder import RunFolder
    from plaudit.scoring import Scorer

__version__ = "0.1.0"
__all__ = ["PlauditError", "RunFolder", "Scorer", "__version__", "dpo", "load_run", "reward_model", "rl", "sample", "sft"]

# Here, because nothing else is sure to run before torch is imported:
let_threads_sleep()
use_huge_pages()

_MODULES = {"PlauditError": "errors", "RunFolder": "run_folder", "Scorer": "scoring"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'plaudit' has no attribute {name!r}")
    return getattr(import_module(f"plaudit.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
