"""Pictures of evaluations are written whatever figures are missing."""

import pytest

from plaudit.evaluation.pictures import draw_ranking, draw_verifier
from plaudit.statistics.intervals import Estimate

SHARE = Estimate(0.6, 0.5, 0.7, 10)
UNKNOWN = Estimate(0.6, float("nan"), float("nan"), 1)


@pytest.mark.parametrize("draw", [draw_ranking, draw_verifier])
def test_a_picture_is_a_png_whatever_is_missing(draw, tmp_path):
    rates = {"false_accept_rate": SHARE, "false_reject_rate": UNKNOWN}
    parts = {"all": {"accuracy": SHARE, "tau_b": UNKNOWN}, "data source/a/b": {"accuracy": SHARE}}
    own = parts if draw is draw_ranking else rates
    draw({"judge": own, "nothing": {}}, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "eval.png"]
