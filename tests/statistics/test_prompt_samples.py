"""The samples of a prompt: those without a value are left out of every figure."""

import numpy as np
import pytest

from plaudit.statistics.prompt_samples import PromptSamples

NAN = float("nan")


def samples(*values: float, answers: str = "", threshold: float = 0.5) -> PromptSamples:
    return PromptSamples(np.array(values), list(answers) or [None] * len(values), threshold)


def test_figures_are_those_of_the_samples_with_a_value():
    known, with_failures = samples(1.0, 0.0, 0.5, answers="aba"), samples(NAN, 1.0, 0.0, NAN, 0.5, answers="babba")
    for k in (1, 2, 3):
        assert with_failures.pass_at(k) == known.pass_at(k)
        assert with_failures.majority_at(k) == known.majority_at(k)
        assert with_failures.best_of(k) == known.best_of(k)
    assert with_failures.mean == known.mean == 0.5
    assert np.isnan([with_failures.pass_at(4), with_failures.majority_at(4), with_failures.best_of(4)]).all()
    assert np.isnan([samples(NAN).mean, samples(NAN).pass_at(1)]).all()


def test_a_sample_passes_from_the_threshold_on():
    assert samples(0.5, 0.4, threshold=0.5).pass_at(1) == 0.5
    assert samples(-2.0, -1.0, -1.0, threshold=-1.0).pass_at(1) == pytest.approx(2 / 3)


def test_the_best_of_k_is_chosen_by_another_reward():
    prompt = samples(1.0, 2.0, 6.0)
    assert prompt.best_of(3) == 6.0
    assert prompt.best_of(3, np.array([9.0, 0.0, 0.0])) == 1.0
    assert prompt.best_of(2, np.array([9.0, 0.0, NAN])) == 1.0
