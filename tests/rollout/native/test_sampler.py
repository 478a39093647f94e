"""Tokens are drawn from exactly the requested distribution, with noise that depends on its key only.

A chi-square test rejects a sampler whose p-value is below 1e-6. Keys are fixed, so no test fails by chance. A separate test shows
what this would catch.
"""

import math

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from plaudit.rollout.engine import Sampling
from plaudit.rollout.native import sampler
from plaudit.rollout.native.noise import gumbel, position_keys
from plaudit.rollout.native.sampler import Drawn, draw, keep_likely, tile_noise
from plaudit.seeding import stable_seed

pytestmark = pytest.mark.grid(4)

DRAWS = 40_000
UNLIKELY = 1e-6
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.7},
    "top k": {"top_k": 5},
    "top p": {"top_p": 0.8},
    "min p": {"min_p": 0.1},
    "top k and p": {"top_k": 8, "top_p": 0.7},
    "all": {"temperature": 0.7, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
}


def sampling_of(**settings) -> Sampling:
    return Sampling(max_new_tokens=1, **settings)


def sequence_keys(count: int, seed: int = 0) -> Tensor:
    """Keys as the scheduler makes them: one per sample index."""
    keys = [stable_seed(seed, 0, "prompt", index) for index in range(count)]
    return torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys])


@pytest.fixture(scope="module")
def keys() -> dict[str, Tensor]:
    """Keys of one position across many sequences, along a few long sequences, and of both."""
    sequences = sequence_keys(DRAWS)
    along = position_keys(sequences[:4].repeat_interleave(DRAWS // 4), torch.arange(DRAWS // 4).repeat(4))
    both = position_keys(sequences[:200].repeat_interleave(DRAWS // 200), torch.arange(DRAWS // 200).repeat(200))
    return {"across": position_keys(sequences, torch.zeros(DRAWS, dtype=torch.long)), "along": along, "both": both}


def logits_of(vocabulary: int, scale: float = 1.5, seed: int = 0) -> Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits_V: Tensor, keys_B: Tensor, **settings) -> Tensor:
    """A token for every key; in chunks, because the noise for all keys would be large."""
    sampling = sampling_of(**settings)
    return torch.cat([draw(logits_V.expand(len(keys), -1), keys, sampling).tokens_B for keys in keys_B.split(8192)])


def exact(
    logits_V: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The reference distribution, computed token by token."""
    probs = (logits_V.double() / temperature).softmax(-1)
    kept = sorted(range(len(probs)), key=lambda v: -probs[v])[:top_k]
    total, nucleus, mass = sum(float(probs[v]) for v in kept), [], 0.0
    for v in kept:
        if mass / total >= top_p:
            break
        nucleus.append(v)
        mass += float(probs[v])
    nucleus = [v for v in nucleus if probs[v] >= min_p * probs.max()]
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Of Pearson's chi-square test; cells with an expected count below 10 are pooled."""
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probs.double() * counts.sum()
    small, counts = expected < 10, counts.double()
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


def assert_drawn_from(tokens: Tensor, probs: Tensor) -> None:
    p = p_value(torch.bincount(tokens, minlength=len(probs)), probs)
    assert p > UNLIKELY, p


# Distributions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["across", "along", "both"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_come_from_the_exact_distribution(keys, settings, direction):
    logits = logits_of(40)
    assert_drawn_from(draws(logits, keys[direction], **settings), exact(logits, **settings))


@pytest.mark.parametrize("vocabulary", [2, 3, 1000])
def test_small_and_large_vocabularies(keys, vocabulary):
    logits = logits_of(vocabulary)
    assert_drawn_from(draws(logits, keys["both"]), exact(logits))


@pytest.mark.parametrize("tile", [1, 2, 7, 8, 20, 39, 40])
@pytest.mark.parametrize("direction", ["across", "along"])
def test_draws_by_tile_come_from_the_exact_distribution(keys, monkeypatch, tile, direction):
    """A tile of the vocabulary is drawn, then one of its tokens: with equal tiles and a smaller last one, some impossible."""
    monkeypatch.setattr(sampler, "TILE", tile)
    logits = logits_of(40)
    logits[8:16] = logits[20] = -math.inf
    for settings in ({}, {"temperature": 0.7}, {"top_p": 0.8}):
        tokens = draws(logits, keys[direction], **settings)
        assert_drawn_from(tokens, exact(logits, **settings))
    assert torch.equal(draws(logits, keys[direction], temperature=0.0), logits.argmax().expand(DRAWS))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 8, 9, 16, 40])
def test_the_drawn_token_has_the_highest_draw_score(keys, monkeypatch, vocabulary, settings):
    monkeypatch.setattr(sampler, "TILE", 8)
    arguments = logits_of(vocabulary).expand(500, -1), keys["both"][:500], sampling_of(**settings)
    assert torch.equal(sampler.draw_scores(*arguments).argmax(-1), draw(*arguments).tokens_B)


def test_a_tile_and_the_token_in_it_are_independent(keys, monkeypatch):
    """Pairs of a tile and a place in it, for logits that make them independent."""
    monkeypatch.setattr(sampler, "TILE", 6)
    tiles, places = logits_of(5), logits_of(6, seed=1)
    tokens = draws((tiles[:, None] + places).flatten(), keys["both"])
    assert_drawn_from(tokens, (exact(tiles)[:, None] * exact(places)).flatten())
    assert_drawn_from(tokens // 6 * 6 + tokens.roll(1) % 6, (exact(tiles)[:, None] * exact(places)).flatten())


def test_rare_tokens_are_drawn_at_the_right_rate(keys):
    """Eight tokens with odds of one in a thousand each, and eight with one in 13 thousand."""
    logits = torch.cat([torch.zeros(1), torch.full((8,), math.log(1e-3)), torch.full((8,), math.log(1e-3 / 13))])
    tokens = torch.cat([draws(logits, keys[direction]) for direction in ("across", "along")])
    probs, counts = exact(logits), torch.bincount(tokens, minlength=17)
    for cells in (slice(1, 9), slice(9, 17)):
        expected = probs[cells].sum() * len(tokens)
        assert abs(counts[cells].sum() - expected) < 5 * expected.sqrt()


def test_the_check_detects_a_wrong_distribution(keys):
    """A temperature that is off by 5 %, or a missing token."""
    logits = logits_of(40)
    tokens = draws(logits, keys["across"])
    for probs in (
        exact(logits, temperature=1.05),
        exact(logits, temperature=0.95),
        exact(logits.roll(1)),
        exact(logits, top_p=0.99),
    ):
        with pytest.raises(AssertionError):
            assert_drawn_from(tokens, probs)


@pytest.mark.parametrize("direction", ["across", "along"])
def test_neighbouring_draws_are_independent(keys, direction):
    """Tokens at adjacent positions of a sequence, or at one position of adjacent sequences, as pairs."""
    logits = logits_of(6, scale=0.7)
    tokens, probs = draws(logits, keys[direction]), exact(logits)
    assert_drawn_from(tokens[0::2] * 6 + tokens[1::2], (probs[:, None] * probs).flatten())


def test_seeds_and_positions_are_independent():
    logits, count = logits_of(6, scale=0.7), 20_000
    probs = exact(logits)
    pairs = (probs[:, None] * probs).flatten()
    at_0, at_1 = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.long)
    first = draws(logits, position_keys(sequence_keys(count), at_0))
    assert_drawn_from(first * 6 + draws(logits, position_keys(sequence_keys(count, seed=1), at_0)), pairs)
    assert_drawn_from(first * 6 + draws(logits, position_keys(sequence_keys(count), at_1)), pairs)


# Noise ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noise(keys) -> Tensor:
    """[2000, 1000]: half of the rows across sequences, half along them."""
    return gumbel(torch.cat([keys["across"][:1000], keys["along"][:1000]]), 1000)


def test_moments_of_the_noise(noise):
    """Mean γ, variance π²/6, skewness 1.1395; for two million values, to within 5 standard errors."""
    g = noise.double().flatten()
    sigma = math.pi / math.sqrt(6)
    assert g.mean().item() == pytest.approx(0.5772157, abs=5 * sigma / math.sqrt(len(g)))
    assert g.var().item() == pytest.approx(sigma**2, abs=5 * sigma**2 * math.sqrt(4.4 / len(g)))
    assert (((g - g.mean()) / g.std()) ** 3).mean().item() == pytest.approx(1.1395, abs=0.03)


@pytest.mark.parametrize("x", [-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 8.0, 10.0, 12.0])
def test_tails_of_the_noise(noise, x):
    """P(g > x) = 1 − exp(−exp(−x)). Of two million, 91 exceed 10, where noise with too few bits has none or too many."""
    p = -math.expm1(-math.exp(-x))
    assert abs((noise > x).sum().item() - p * noise.numel()) < 5 * math.sqrt(noise.numel() * p * (1 - p)) + 1


def test_extremes_are_finite():
    """The smallest and largest of four million are in the expected range, and none is infinite."""
    g = gumbel(position_keys(sequence_keys(4), torch.arange(4)), 1_000_000)
    assert g.isfinite().all()
    assert 12 < g.max() < 22.3
    assert -3.0 < g.min() < -2.4


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


def test_noise_is_uncorrelated(noise):
    """Between tokens near and far, positions, and sequences; of g and of its square, to within 5 standard errors."""
    across, along = noise[:1000], noise[1000:]
    for transform in (lambda g: g, lambda g: (g - 0.5772).square().clamp(max=20)):
        for rows in (across, along):
            x = transform(rows)
            for lag in (1, 2, 3, 4, 8, 16, 64, 128, 256, 512):
                bound = 5 / math.sqrt(1000 * (1000 - lag))
                assert abs(correlation(x[:, lag:], x[:, :-lag])) < bound, f"tokens {lag} apart"
                assert abs(correlation(x[lag:], x[:-lag])) < bound, f"rows {lag} apart"
            assert abs(correlation(x[1:, 1:], x[:-1, :-1])) < 5 / 999
            assert abs(correlation(x[1:, :-1], x[:-1, 1:])) < 5 / 999


def test_noise_never_changes():
    """A run resumed with another version must draw the same tokens. (The golden values were computed with Python integers.)"""
    assert position_keys(torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 1, 2, 1000])).tolist() == GOLDEN_KEYS
    assert tile_noise(torch.tensor([0]), 3)[0].tolist() == pytest.approx(GOLDEN_TILES, abs=2e-6)
    logits = (torch.arange(10_000) * 0.37).sin() * 4
    assert draws(logits, torch.arange(14)).tolist() == GOLDEN_DRAWS, "by tiles of 4,096"
    for key, expected in GOLDEN_NOISE.items():
        torch.testing.assert_close(
            gumbel(torch.tensor([key]), 50_000)[0, GOLDEN_TOKENS], torch.tensor(expected), rtol=2e-6, atol=2e-6
        )


GOLDEN_DRAWS = [5794, 2944, 3163, 5964, 3504, 1905, 2722, 3911, 6168, 7000, 5543, 89, 5727, 7628]
GOLDEN_TILES = [-0.868467, 1.527280, -0.862312]
GOLDEN_TOKENS = [0, 1, 2, 319, 49_999]
GOLDEN_KEYS = [-2152535657050944081, -4689498862643123097, 4048727598324417001, 2080747228998036398]
GOLDEN_NOISE = {
    0: [22.18071, -0.153399, 0.020583, -0.430658, 2.646225],
    1: [0.125966, -0.250478, 0.603902, -0.296558, -1.088626],
    -1: [0.020604, 0.670305, 1.45858, -0.207455, 0.818577],
    0x123456789ABCDEF0: [0.113252, 1.744013, 1.305895, 1.649145, -0.888053],
    -(1 << 63): [-0.343361, 1.119661, 4.207542, 0.36441, 0.208888],
}


def test_splitmix64():
    """Position keys of key 0 are the published first outputs of splitmix64 with state 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    ours = position_keys(torch.zeros(4, dtype=torch.long), torch.arange(4))
    assert [key % (1 << 64) for key in ours.tolist()] == published


def test_noise_is_the_same_in_any_batch(keys):
    some = keys["both"][:50]
    full = gumbel(some, 500)
    assert torch.equal(gumbel(some.flip(0), 500).flip(0), full)
    assert torch.equal(torch.cat([gumbel(key[None], 500) for key in some]), full)
    torch.testing.assert_close(gumbel(some, 333), full[:, :333])
    assert len(full[:, 0].unique()) == 50


def test_tokens_are_the_same_in_any_batch(keys):
    logits, some = logits_of(500), keys["both"][:64]
    together = draws(logits, some, top_p=0.9)
    assert torch.equal(together, torch.cat([draws(logits, key[None], top_p=0.9) for key in some]))


# Top-k, top-p and min-p ----------------------------------------------------------------------------------------------


def kept(logits: Tensor, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    result = keep_likely(logits, top_k, top_p, min_p)
    assert torch.equal(result[result.isfinite()], logits[result.isfinite()]), "kept logits are unchanged"
    return result.isfinite()


@pytest.mark.parametrize("top_k", [None, 1, 2, 7, 50, 199, 200, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.001, 0.05, 0.5])
def test_the_same_tokens_are_kept_as_in_transformers(top_k, top_p, min_p):
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 6, 64)[:, None]
    theirs = logits
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1.0:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p > 0.0:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    assert torch.equal(kept(logits, top_k, top_p, min_p), theirs.isfinite())


def test_kept_tokens_computed_by_hand():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    assert kept(logits, top_k=2).tolist() == [[True, True, False, False], [False, False, True, True]]
    assert kept(logits, top_p=0.39)[0].tolist() == [True, False, False, False]
    assert kept(logits, top_p=0.41)[0].tolist() == [True, True, False, False], "with the token that crosses the threshold"
    assert kept(logits, min_p=0.49)[0].tolist() == [True, True, True, False]
    assert kept(logits, top_k=2, top_p=0.56)[0].tolist() == [True, False, False, False], "of what top-k leaves: 0.4 / 0.7 = 0.571"
    assert kept(logits, top_k=2, top_p=0.58)[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.35}, {"min_p": 0.3 / 0.5 - 1e-4}], ids=str)
def test_ties_are_kept_together(keys, settings):
    """Three tokens tie for second place; however they are sorted, all are kept and drawn equally often."""
    logits = torch.tensor([0.1, 0.3, 0.1, 0.5, 0.3, 0.05, 0.3]).log()
    assert kept(logits[None], **settings)[0].tolist() == [False, True, False, True, True, False, True]
    probs = torch.tensor([0, 0.3, 0, 0.5, 0.3, 0, 0.3])
    assert_drawn_from(draws(logits, keys["across"], **settings), probs / probs.sum())


def test_equal_logits_are_all_kept(keys):
    """All tie, so none is dropped."""
    for settings in ({}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.99}):
        assert_drawn_from(draws(torch.zeros(10), keys["along"], **settings), torch.full((10,), 0.1))


# Edges ---------------------------------------------------------------------------------------------------------------


def drawn(logits: Tensor, keys: Tensor, **settings) -> Drawn:
    return draw(logits, keys[: len(logits)], sampling_of(**settings))


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str
)
def test_keeping_only_the_best_token_is_greedy(keys, settings):
    logits = torch.stack([logits_of(100, seed=seed) for seed in range(500)])
    assert torch.equal(drawn(logits, keys["across"], **settings).tokens_B, logits.argmax(-1))
    assert torch.equal(drawn(logits, keys["across"], **{**settings, "temperature": 0.0}).tokens_B, logits.argmax(-1))


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"temperature": 0.0}], ids=str)
def test_a_vocabulary_of_one_token(keys, settings):
    result = drawn(torch.full((20, 1), 3.0), keys["across"], **settings)
    assert result.tokens_B.tolist() == [0] * 20
    assert result.logprobs_B.tolist() == result.untempered_B.tolist() == [0.0] * 20


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_impossible_tokens_are_never_drawn(keys, settings):
    logits = logits_of(40)
    logits[::3] = -math.inf
    tokens = draws(logits, keys["both"], **settings)
    assert_drawn_from(tokens, exact(logits, **settings))
    result = drawn(logits.expand(500, -1), keys["both"], **settings)
    assert result.logprobs_B.isfinite().all()
    only = torch.full((20, 40), -math.inf)
    only[:, 17] = -2.0
    assert set(drawn(only, keys["both"], **settings).tokens_B.tolist()) == {17}


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_large_logits(keys, settings, shift):
    """Only differences matter, as far as fp32 resolves them at this size."""
    logits = logits_of(40) + shift
    assert_drawn_from(draws(logits, keys["across"], **settings), exact(logits, **settings))
    result = drawn(logits.expand(500, -1), keys["across"], **settings)
    expected = (logits.double() / settings.get("temperature", 1.0)).log_softmax(-1)[result.tokens_B]
    torch.testing.assert_close(result.logprobs_B.double(), expected, rtol=0, atol=4e-3)


def test_one_dominant_token(keys):
    logits = torch.zeros(500, 40)
    logits[:, 11] = 1e4
    for settings in SETTINGS.values():
        result = drawn(logits, keys["across"], **settings)
        assert set(result.tokens_B.tolist()) == {11}
        assert result.logprobs_B.tolist() == [0.0] * 500


# Log-probs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"temperature": 0.0}], ids=str)
def test_logprobs_are_of_the_full_softmax(keys, settings):
    """Tokens dropped by top-k, top-p and min-p still count in the sum."""
    logits = torch.stack([logits_of(100, seed=seed) for seed in range(500)])
    result = drawn(logits, keys["across"], **settings)
    at = torch.arange(500), result.tokens_B
    tempered = (logits.double() / (settings.get("temperature") or 1.0)).log_softmax(-1)[at]
    torch.testing.assert_close(result.logprobs_B.double(), tempered, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.untempered_B.double(), logits.double().log_softmax(-1)[at], rtol=0, atol=1e-5)
    assert result.logprobs_B.dtype == result.untempered_B.dtype == torch.float32


def test_logits_are_not_modified(keys):
    logits = torch.stack([logits_of(100, seed=seed) for seed in range(8)])
    before = logits.clone()
    for settings in SETTINGS.values():
        drawn(logits, keys["across"], **settings)
    assert torch.equal(logits, before)
