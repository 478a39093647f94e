"""A recipe can require an evaluation of its rewards, as it can require an audit."""

import json

import pytest

from plaudit.audit.certificate import digest_rewards
from plaudit.audit.evaluated import require_evaluated
from plaudit.errors import PlauditError
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.evaluation import EvalSettings


def rewards(**changed):
    return ScoreRecipe.model_validate({"rewards": [{"kind": "exact"} | changed]}).rewards


def estimate(value, low, high):
    return {"value": value, "low": low, "high": high, "n": 100}


@pytest.fixture
def report(tmp_path):
    """An eval.json of two rewards; changes to what is in it are written."""
    content = {
        "kind": "rewards",
        "figures": {
            "rule": {
                "LLMBar": {"accuracy": estimate(0.8, 0.72, 0.86)},
                "LLMBar/natural": {"accuracy": estimate(0.9, 0.85, 0.95), "position_bias": estimate(0.1, 0.05, 0.2)},
            },
            "other": {"LLMBar": {"accuracy": estimate(0.1, 0.1, 0.1)}},
        },
        "details": {
            "other": {"rewards": digest_rewards(rewards(weight=2.0)), "failed": 0, "items": 100},
            "rule": {"rewards": digest_rewards(rewards()), "failed": 1, "items": 100},
        },
    }

    def write(**changed):
        file = tmp_path / "eval.json"
        file.write_text(json.dumps(content | changed))
        return str(file)

    return write


def test_the_figures_of_exactly_these_rewards_must_be_within_the_bounds(report):
    file = report()
    assert require_evaluated(EvalSettings(require=file, at_least={"accuracy": 0.8}), rewards()) == "rule"
    with pytest.raises(PlauditError, match=r"LLMBar: accuracy is 0\.8, less than 0\.81"):
        require_evaluated(EvalSettings(require=file, at_least={"accuracy": 0.81}), rewards())
    with pytest.raises(PlauditError, match=r"accuracy is 0\.1, less than"):
        require_evaluated(EvalSettings(require=file, at_least={"accuracy": 0.8}), rewards(weight=2.0))


def test_bounds_of_a_part_and_of_the_end_of_the_interval(report):
    file = report()
    within = {"at_least": {"LLMBar/natural: accuracy": 0.9}, "at_most": {"LLMBar/natural: position_bias": 0.1}}
    require_evaluated(EvalSettings.model_validate({"require": file, **within}), rewards())
    with pytest.raises(PlauditError) as error:
        require_evaluated(EvalSettings.model_validate({"require": file, "by": "interval", **within}), rewards())
    assert "accuracy is 0.85 at the end of its interval, less than 0.9" in str(error.value)
    assert "position_bias is 0.2 at the end of its interval, more than 0.1" in str(error.value)


def test_a_bound_in_per_cent_is_a_mistake(report):
    """Every figure would be below it."""
    with pytest.raises(PlauditError, match=r"at_most of 'LLMBar/natural: position_bias' is 5, but figures are between 0 and 1"):
        require_evaluated(EvalSettings(require=report(), at_most={"LLMBar/natural: position_bias": 5}), rewards())


def test_other_rewards_and_changed_ones_are_refused(report):
    for changed in ({"weight": 3.0}, {"kind": "math"}):
        with pytest.raises(PlauditError, match="which are not these rewards as they are now"):
            require_evaluated(EvalSettings(require=report()), rewards(**changed))


def test_an_evaluation_with_many_failures_is_refused(report):
    details = {"rule": {"rewards": digest_rewards(rewards()), "failed": 3, "items": 100}}
    with pytest.raises(PlauditError, match=r"3 of 100 items have no value, and eval\.max_failure_rate is 0\.02"):
        require_evaluated(EvalSettings(require=report(details=details)), rewards())
    require_evaluated(EvalSettings(require=report(details=details), max_failure_rate=0.03), rewards())


def test_a_figure_that_was_not_measured_is_named(report):
    with pytest.raises(PlauditError, match=r"^eval\.require: 'LLMBar/naturl: accuracy' is not in the .*LLMBar/natural: accuracy"):
        require_evaluated(EvalSettings(require=report(), at_least={"LLMBar/naturl: accuracy": 0.5}), rewards())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("[]", r"is not an eval\.json"),
        ('{"kind": "rewards"', r"is not an eval\.json"),
        ('{"kind": "policy", "figures": {"model": {}}, "details": {"model": {}}}', "is an evaluation of policy, not of rewards"),
    ],
)
def test_files_that_are_no_evaluation_of_rewards(tmp_path, content, message):
    file = tmp_path / "eval.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PlauditError, match=message):
        require_evaluated(EvalSettings(require=str(file)), rewards())


def test_bounds_without_a_file_are_a_mistake():
    with pytest.raises(ValueError, match=r"name its eval\.json with require"):
        EvalSettings(at_least={"accuracy": 0.5})
