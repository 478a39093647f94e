"""The engine's server, lost for good."""

from types import SimpleNamespace

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
    engine._server = SimpleNamespace(lost="RuntimeError: CUDA error", log="engine_0.log")  # pyright: ignore
    engine._settings = SimpleNamespace(restarts=2)  # pyright: ignore
    engine._restarts, engine._has_sampled = restarts, has_sampled
    with pytest.raises(ServerGone, match=rf"its server is lost \(RuntimeError: CUDA error\), .*{problem}.*engine_0\.log\. If that"):
        engine._restart("the connection was closed")
