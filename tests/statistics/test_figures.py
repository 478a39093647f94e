"""Many figures of the same items: weighted means, prompts resampled, paired differences."""

import math

import numpy as np
import pytest

from plaudit.statistics.figures import Resampling, estimate_all, estimate_means, means_by_name, weighted_means
from plaudit.statistics.intervals import Estimate

NAN = math.nan


def test_weighted_means_by_hand():
    weights = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    assert weighted_means(weights, np.array([1.0, NAN, 4.0])).tolist() == pytest.approx([2.5, 2.0, NAN], nan_ok=True)
    assert np.isnan(weighted_means(weights, np.array([NAN, NAN, NAN]))).all()


def test_many_figures_are_computed_as_one_is():
    generator = np.random.default_rng(0)
    weights = generator.integers(0, 3, size=(20, 8)).astype(float)
    figures = {name: np.where(generator.random(8) < 0.5, NAN, generator.normal(size=8)) for name in "abc"} | {
        "none": np.full(8, NAN)
    }
    found = means_by_name(weights, figures)
    for name, values in figures.items():
        np.testing.assert_allclose(found[name], weighted_means(weights, values))
    assert means_by_name(weights, {}) == {}


def test_figures_are_resampled_together():
    """The interval of a difference is that of the items' differences, whatever else is estimated with it."""
    a, b = np.random.default_rng(0).normal(size=(2, 40))
    resampling = Resampling(seed=3, resamples=200, confidence=0.8)
    together = estimate_means({"a": a, "a − b": a - b}, range(40), resampling)
    for name, values in (("a", a), ("a − b", a - b)):
        weights = np.random.default_rng(3).integers(40, size=(200, 40))
        low, high = np.quantile(values[weights].mean(1), [0.1, 0.9])
        expected = Estimate(values.mean(), low, high, 40)
        for field in ("value", "low", "high", "n"):
            assert getattr(together[name], field) == pytest.approx(getattr(expected, field))


def test_items_of_a_prompt_are_drawn_together():
    values = np.array([0.0, 1.0, 0.0, 1.0])

    def statistic(weights_BI: np.ndarray) -> dict[str, np.ndarray]:
        return {"mean": weighted_means(weights_BI, values)}

    assert estimate_all(statistic, {"mean": 4}, [0, 0, 1, 1], Resampling()) == {"mean": Estimate(0.5, 0.5, 0.5, 4)}
    by_value = estimate_all(statistic, {"mean": 4}, [0, 1, 0, 1], Resampling())["mean"]
    assert (by_value.low, by_value.high) == (0.0, 1.0)


def test_a_figure_without_items_has_no_number():
    def statistic(weights_BI: np.ndarray) -> dict[str, np.ndarray]:
        return means_by_name(weights_BI, {"none": np.full(2, NAN)})

    found = estimate_all(statistic, {"none": 0}, [0, 1], Resampling(resamples=10))["none"]
    assert found.n == 0
    assert all(math.isnan(number) for number in (found.value, found.low, found.high))
    assert estimate_all(statistic, {}, [], Resampling()) == {}
