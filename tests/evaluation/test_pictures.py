"""Pictures of evaluations are written whatever figures are missing."""

import pytest

from plaudit.evaluation.pictures import draw_policy, draw_ranking, draw_verifier
from plaudit.evaluation.policy_tables import best_of_curves
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


def test_curves_of_policies_are_a_png_whatever_is_missing(tmp_path):
    figures = {"pass@1": SHARE, "pass@4": UNKNOWN, "majority@4": SHARE, "best_of@1/judge": SHARE, "proxy@1/judge": UNKNOWN}
    policies = {"_a$b": {"all": figures}, "nothing": {}}
    draw_policy(
        policies, best_of_curves(policies, ["gold", "judge", "rule"], [1, 4])["best of n"], "gold", [1, 4], tmp_path / "p.png"
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
