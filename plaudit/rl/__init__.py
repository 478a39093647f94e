"""The RL step: collecting scored groups and training on them.

As an attribute of `plaudit`, this package takes the place of the function `plaudit.rl` once it is imported; so it can be called.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **sections: Any) -> Any:
        from plaudit.api import rl

        return rl(*arguments, **sections)


sys.modules[__name__].__class__ = _CallablePackage
