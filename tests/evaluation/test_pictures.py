"""Pictures of evaluations are written whatever figures are missing."""

import warnings

import pytest

from plaudit.errors import PlauditError
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


@pytest.mark.parametrize("draw", [draw_ranking, draw_verifier])
@pytest.mark.parametrize("name", ["$x^$", "\u88c1\u5224", None])
def test_no_warning_whatever_names_are_and_if_nothing_has_a_value(draw, name, tmp_path):
    own = (
        {"all": {"accuracy": SHARE, "tau_b": SHARE}}
        if draw is draw_ranking
        else {"false_accept_rate": SHARE, "false_reject_rate": SHARE}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw({"nothing": {}} if name is None else {name: own}, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").exists()


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "eval.png").mkdir()
    with pytest.raises(PlauditError, match=r"--out: .*eval\.png cannot be written: "):
        draw_verifier({}, tmp_path / "eval.png")
    assert list(tmp_path.iterdir()) == [tmp_path / "eval.png"]
