"""Samples as parquet rows, and their metrics."""

import warnings

import numpy as np
import pytest

from plaudit.data.rows import read_rows
from plaudit.report.samples import TokenDetails, kept_steps, length_metrics, source_line, write_samples
from plaudit.types import Experience, Group, Prompt, Sample, Score, ScoredGroup


def scored(*logprobs: list[float] | None) -> ScoredGroup:
    """A group of samples with these log-probs per token; None: of one token, from an engine that does not compute them."""
    samples = []
    for i, values in enumerate(logprobs):
        tokens = np.zeros(1 if values is None else len(values), np.int32)
        untempered = None if values is None else np.array(values, np.float32)
        samples.append(Sample("p", i, tokens, "x" * len(tokens), "finished", np.zeros(len(tokens), np.float32), untempered, 0))
    prompt = Prompt("p", [{"role": "user", "content": "q"}])
    return ScoredGroup(Group(prompt, np.ones(1, np.int32), tuple(samples)), tuple(Score(1.0) for _ in samples), {})


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_sample_without_tokens_has_no_mean_logprob(tmp_path):
    group = scored([-1.0, -2.0], [], None)
    write_samples(tmp_path / "s.parquet", [group])
    assert [row["mean_logprob"] for row in read_rows(tmp_path / "s.parquet")] == [-1.5, None, None]
    assert length_metrics([group])["untempered_logprob"] == -1.5


def test_without_any_token_there_is_no_mean_logprob():
    assert "untempered_logprob" not in length_metrics([scored([])])
    assert "untempered_logprob" not in length_metrics([scored(None)])


def test_rewards_by_source_fit_a_line():
    rewards = {"openai/gsm8k": 0.5, "a\x1b[2J" + "b" * 60: 0.25, "rare": 1.0}
    assert source_line({"a": 0.5, "b": -1.0}, 80) == "val/reward by data_source:  a 0.5000  b -1.0000"
    assert source_line(rewards, 60) == "val/reward by data_source:  openai/gsm8k 0.5000"
    assert "\x1b" not in source_line(rewards, 200)


def test_kept_steps_are_the_newest_and_some_of_all_others():
    steps: set[int] = set()
    for step in range(1, 1001):
        steps = kept_steps(sorted({*steps, step}), 16)
        assert len(steps) <= 16
        assert set(range(max(1, step - 7), step + 1)) <= steps
    assert sorted(steps)[:-8] == [128, 256, 384, 512, 640, 768, 896, 960]
    assert kept_steps([1, 2, 3], 1) == {3}


def test_advantages_and_tokens_of_what_was_trained_on(tmp_path):
    group, other = scored([-1.0, -2.0], [-3.0]), scored([-1.0])
    tokens, mask = np.zeros(3, np.int32), np.array([False, True, True])
    sampled, now, reference = (np.array(pair, np.float32) for pair in ([-1.0, -2.0], [-1.5, -2.0], [-1.0, -1.0]))
    trained = Experience(tokens, mask, 1.0, np.array([0.5, 1.5], np.float32), sampled, old_logprobs=now, ref_logprobs=reference)
    details = TokenDetails(groups=1, decode=lambda ids: "ab")
    write_samples(tmp_path / "s.parquet", [group, other], {(id(group.group), 0): trained}, details)
    first, untrained, no_tokens = read_rows(tmp_path / "s.parquet")
    assert (first["advantage"], untrained["advantage"]) == (1.0, None)
    assert first["token/text"] == ["ab", "ab"]
    assert (first["token/logprob"], first["token/advantage"]) == ([-1.0, -2.0], [0.5, 1.5])
    assert (first["token/mismatch"], first["token/kl"]) == ([-0.5, 0.0], [-0.5, -1.0])
    assert (untrained["token/logprob"], untrained["token/advantage"]) == ([-3.0], None)
    assert no_tokens["token/text"] is None
