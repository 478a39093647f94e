"""The engine's server, lost for good."""

from types import SimpleNamespace
from typing import Any

import pytest

from plaudit.errors import ServerGone
from plaudit.rollout.served.engine import VllmEngine


@pytest.mark.parametrize(
    ("restarts", "has_sampled", "problem"),
    [(2, True, r"was started again 2 times already \(rollout\.server\.restarts\)"), (1, False, "again, without a sample since")],
)
def test_a_server_that_is_lost_for_good(restarts, has_sampled, problem):
    """All processes of a run may be restarted because of it."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._dialect = SimpleNamespace(name="vllm")  # pyright: ignore
    server: Any = SimpleNamespace(lost="RuntimeError: CUDA error", where_to_look="Its output: engine_0.log")
    engine._settings = SimpleNamespace(restarts=2)  # pyright: ignore
    engine._restarts, engine._has_sampled = restarts, has_sampled
    with pytest.raises(ServerGone, match=rf"its server is lost \(RuntimeError: CUDA error\), .*{problem}.*engine_0\.log\. If that"):
        engine._restart(server, "the connection was closed")
