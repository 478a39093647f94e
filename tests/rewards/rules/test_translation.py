"""bleu and chrf: sacrebleu's numbers, by hand where they are short, and what a policy could earn without translating."""

import importlib.util
from typing import Any

import pytest

from plaudit.errors import RecipeError
from plaudit.rewards.rules import translation
from plaudit.scoring import Scorer

REFERENCE = "The committee adopted the report without a vote."
CHINESE = "委员会未经表决通过了该报告。"


def scored(kind: str, *responses: str, truth: Any = REFERENCE, settings: Any = (), **extra_info: Any) -> dict[str, Any]:
    pytest.importorskip("sacrebleu", reason="needs plaudit[translation]")
    with Scorer([{"kind": kind, **dict(settings)}]) as scorer:
        [row] = scorer.score([{"prompt": "p", "responses": list(responses), "ground_truth": truth, "extra_info": extra_info}])
    return row


def test_bleu_by_hand():
    """p₁ … p₄ = 5/6, 3/5, 2/4, 1/3; as long as the reference."""
    row = scored("bleu", "the cat sat on the mat", truth="the cat sat on a mat")
    assert row["reward"] == [pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)]


def test_chrf_by_hand():
    """Of `ab` both characters and its one pair are in `abc`: P = 1, R = (2/3 + 1/2) / 2."""
    recall = (2 / 3 + 1 / 2) / 2
    assert scored("chrf", "ab", truth="abc")["reward"] == [pytest.approx(5 * recall / (4 + recall))]
    row = scored("chrf", "ab", truth="abc", settings={"beta": 1})
    assert row["reward"] == [pytest.approx(2 * recall / (1 + recall))]


def test_numbers_are_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs plaudit[translation]")
    responses = ["The report was adopted without vote.", "The committee did not adopt the report.", "Adopted.", "It rains."]
    references = [REFERENCE, "The report was adopted by the committee without a vote."]
    got = scored("bleu", *responses, truth=references)["reward"]
    assert got == pytest.approx([sacrebleu.sentence_bleu(response, references).score / 100 for response in responses])
    assert 0 < got[1] < got[0] < 1
    got = scored("chrf", *responses, truth=references, settings={"word_order": 2})["reward"]
    assert got == pytest.approx([sacrebleu.sentence_chrf(one, references, word_order=2).score / 100 for one in responses])


@pytest.mark.parametrize("language", ["zh", "ZH_Hans", "Chinese (simplified)", "Simplified Chinese", "zho_Hans", "cmn"])
def test_the_tokeniser_is_that_of_the_target_language(language):
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs plaudit[translation]")
    response = "委员会未经投票通过了报告。"
    expected = sacrebleu.sentence_bleu(response, [CHINESE], tokenize="zh").score / 100
    assert scored("bleu", response, truth=CHINESE, trg_lang=language)["reward"] == [pytest.approx(expected)]
    assert expected > 0.3
    assert scored("bleu", response, truth=CHINESE, trg_lang="de")["reward"] == [0.0]  # one word in 13a
    fixed = scored("bleu", response, truth=CHINESE, trg_lang="de", settings={"tokenizer": "zh"})
    assert fixed["reward"] == [pytest.approx(expected)]


@pytest.mark.parametrize("language", ["ja", "jpn", "jpn_Jpan", "japanese", "Thai", "lao", "khm_Khmr", "my-MM"])
def test_languages_without_spaces_are_compared_by_character(language):
    row = scored("bleu", "私は猫です", truth="私は犬です", trg_lang=language)
    assert row["reward"] == scored("bleu", "私は猫です", truth="私は犬です", settings={"tokenizer": "char"})["reward"]
    assert row["reward"][0] > 0.1


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
@pytest.mark.parametrize("form", ["{} .", '"{}"', "*{}*", "{}…"])
def test_a_copy_with_other_punctuation_is_a_copy(kind, form):
    source, truth = "Am 3. Juli traf Angela Merkel Emmanuel Macron.", "On 3 July Angela Merkel met Emmanuel Macron."
    assert scored(kind, form.format(source), truth=truth, src_text=source)["malformed"] == [True]
    assert scored(kind, form.format(truth), truth=truth, src_text=source)["malformed"] == [False]


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_what_is_no_translation_earns_nothing(kind):
    source = "Der Report von UNESCO und FIFA, 2024: 37 Seiten"
    truth = "The report of UNESCO and FIFA, 2024: 37 pages"
    copied = source.upper().replace(" ", "\n")
    row = scored(kind, "", " \n", copied, f"{truth} " * 10, truth, truth=truth, src_text=source)
    assert row["reward"] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert row["malformed"] == [True, True, True, True, False]
    assert scored(kind, source, truth=truth)["reward"][0] > 0.1  # what copying would earn if it were not recognised


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_a_source_that_is_also_the_reference_may_be_copied(kind):
    assert scored(kind, "UNESCO, 2024", truth="UNESCO, 2024", src_text="UNESCO, 2024")["reward"] == [1.0]


def test_a_reference_in_the_data_is_required():
    assert scored("bleu", "x", truth=None)["failure"][0]["cause"] == "no_ground_truth"


def test_a_missing_package_is_reported_before_anything_is_scored(monkeypatch):
    monkeypatch.setattr(translation, "find_spec", lambda name: None if name == "sacrebleu" else importlib.util.find_spec(name))
    with (
        pytest.raises(RecipeError, match=r"reward 'bleu': kind: bleu needs sacrebleu: pip install"),
        Scorer([{"kind": "bleu"}]) as scorer,
    ):
        scorer.score([{"prompt": "p", "response": "x", "ground_truth": "x"}])
