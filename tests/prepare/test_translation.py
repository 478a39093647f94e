"""`plaudit prepare translation-sft` and `translation-rl`: rows that train a translation policy."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer import BadParameter

from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.errors import DataError
from plaudit.prepare.ranking import make_ranking_rl
from plaudit.prepare.translation import TARGETS, make_translation_rl, make_translation_sft
from plaudit.prepare.translation_cli import prepare_translation_rl
from plaudit.recipe import View
from plaudit.rewards.view import see
from plaudit.types import Prompt
from support.judges import backend_of, collect, make
from support.rewards import group
from support.rows import write_jsonl
from support.scored_groups import groups

TEXT = {"src_text": "Good morning.", "src_lang": "en", "trg_lang": "de", "trg_text": "Guten Morgen."}


def texts(folder: Path, *changes: dict) -> Path:
    return write_jsonl(folder / "texts.jsonl", [TEXT | change for change in changes or ({},)])


def rl(file: Path, out: Path, **settings) -> list[Prompt]:
    make_translation_rl([file], out, **settings)
    return list(read_prompts(Source(out)))


def test_rl_rows_have_no_ground_truth_and_a_test_set_has(tmp_path):
    [row] = rl(texts(tmp_path), tmp_path / "rl.parquet")
    [message] = row.messages
    assert "from English into German" in message["content"]
    assert "code block" in message["content"]
    assert message["content"].endswith("\n\nSource text:\n```\nGood morning.\n```")
    assert row.ground_truth is None
    assert row.extra_info == {
        **TEXT, "ability": "translation", "src_language": "English", "trg_language": "German",
        "question": "Translate from English into German:\n\nGood morning.",
    }  # fmt: skip
    [test] = rl(texts(tmp_path), tmp_path / "test.jsonl", test_set=True)
    assert (test.ground_truth, test.messages) == ("Guten Morgen.", row.messages)


def test_cross_lingual_rows_have_another_target_and_no_reference(tmp_path):
    file = texts(tmp_path, *({"src_text": f"Text {i}.", "src_lang": "en" if i % 2 else "English"} for i in range(400)))
    prompts = rl(file, tmp_path / "rl.parquet", cross_lingual=True, seed=1)
    own = [prompt for prompt in prompts if prompt.extra_info["trg_lang"] == "de"]
    others = [prompt for prompt in prompts if prompt.extra_info["trg_lang"] != "de"]
    assert len(own) == len(others) == 400
    assert all(len({prompt.extra_info["src_text"] for prompt in half}) == 400 for half in (own, others))
    drawn = Counter(prompt.extra_info["trg_lang"] for prompt in others)
    assert set(drawn) == set(TARGETS) - {"en", "de"}
    assert all(20 < count < 85 for count in drawn.values()), "50 are expected, with a standard deviation of 7"
    assert all(prompt.extra_info.get("trg_text") is None for prompt in others)
    one = next(prompt for prompt in others if prompt.extra_info["trg_lang"] == "zh")
    assert "into Chinese" in one.messages[0]["content"]
    assert one.extra_info["question"].startswith("Translate from English into Chinese:\n\nText ")
    assert [prompt.extra_info["src_text"] for prompt in prompts[:3]] != ["Text 0.", "Text 1.", "Text 2."], "shuffled"
    first, again = (tmp_path / "rl.parquet").read_bytes(), tmp_path / "again.parquet"
    make_translation_rl([file], again, cross_lingual=True, seed=1)
    assert again.read_bytes() == first


@pytest.mark.parametrize("written", ["zh-CN", "zho_Hans", "chinese", "Simplified Chinese"])
def test_cross_lingual_rows_avoid_the_language_however_it_is_written(tmp_path, written):
    file = texts(tmp_path, *({"src_text": f"T {i}.", "trg_lang": written} for i in range(50)))
    prompts = rl(file, tmp_path / "rl.parquet", cross_lingual=True, targets=("en", "zh", "fr"))
    names = Counter(prompt.extra_info["trg_language"] for prompt in prompts)
    assert names == {"French": 50, written if " " in written else "Chinese": 50}


def test_a_judge_of_these_rows_gets_the_prompts_it_was_trained_with(tmp_path):
    [policy] = rl(texts(tmp_path), tmp_path / "rl.parquet")
    two = {"mt_texts": ["Guten Abend.", "Guten Morgen."], "scores": [2, 9]}
    make_ranking_rl([groups(tmp_path, two)], tmp_path / "judge.parquet", shuffle_augment=1)
    trained_on = [prompt.messages[0]["content"] for prompt in read_prompts(Source(tmp_path / "judge.parquet"))]
    reward = make("group_judge", "Ranking:\nA > B\nScores:\nA: 7, B: 3")
    collect(reward, replace(group(*two["mt_texts"]), prompt=policy))
    [(question, _)] = backend_of(reward).calls
    assert question in trained_on


RESPONSES = {
    "Fine.\n\n```\nGuten Morgen.\n```": True,
    "```text\nGuten\nMorgen.\n```\n ": True,
    "`x` and\n  ```\nGuten Morgen.\n  ```": True,
    "Guten Morgen.": False,
    "```\nGuten Morgen.\n```\nDone.": False,
    "```\na\n```\n```\nb\n```": False,
    "```\n \n```": False,
    "so ```a\nGuten Morgen.\n```": False,
    "```\nGuten Morgen. ```": False,
}


def test_sft_keeps_what_the_view_of_the_reward_can_read(tmp_path):
    file = texts(tmp_path, *({"src_text": f"{i}", "response": text} for i, text in enumerate(RESPONSES)))
    made = make_translation_sft([file], tmp_path / "sft.parquet")
    assert str(made) == "3 rows of 3 texts; 6 had a response without a single code block at its end"
    kept = {conversation.messages[1]["content"] for _, conversation in read_conversations(Source(tmp_path / "sft.parquet"))}
    assert kept == {text.strip() for text, good in RESPONSES.items() if good}
    view = View(extract="codeblock")
    assert {text: see(view, text).problem is None for text in RESPONSES} == RESPONSES
    assert make_translation_sft([file], tmp_path / "all.jsonl", any_response=True).rows == len(RESPONSES)


def test_a_template_of_ones_own_sees_the_drawn_language(tmp_path):
    for source in ("{{ extra_info.trg_language }}: {{ task }}", "{{ extra_info.trg_language | upper }}: {{ task }}"):
        (tmp_path / "t.jinja").write_text(source)
        for prompt in rl(texts(tmp_path), tmp_path / f"{len(source)}.parquet", cross_lingual=True, template=tmp_path / "t.jinja"):
            language = prompt.extra_info["trg_language"]
            shown = language.upper() if "upper" in source else language
            assert prompt.messages[0]["content"] == f"{shown}: Translate from English into {language}:\n\nGood morning."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_text": " "}, "row 2: column 'src_text' should be text, not an empty str"),
        ({"src_lang": "qq"}, "row 2: column 'src_lang': 'qq' is no known language code"),
        ({"trg_text": 3}, "row 2: column 'trg_text' should be text, not int"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        make_translation_rl([texts(tmp_path, {}, change)], tmp_path / "rl.parquet")
    made = make_translation_rl([texts(tmp_path, {}, change)], tmp_path / "rl.parquet", skip_bad=True, report=lambda _: None)
    assert (made.rows, made.bad.total()) == (1, 1)


def test_options_that_do_not_fit_are_refused(tmp_path):
    file, out = texts(tmp_path), tmp_path / "rl.parquet"
    for settings in ({"target": ["xx"]}, {"target": ["en", "de"]}, {"test_set": True, "cross_lingual": True}):
        with pytest.raises(BadParameter):
            prepare_translation_rl([file], out, **settings)
    with pytest.raises(DataError, match="column 'trg_text' is missing"):
        make_translation_rl(
            [write_jsonl(tmp_path / "t.jsonl", [{"src_text": "a", "src_lang": "en", "trg_lang": "de"}])], out, test_set=True
        )


def test_real_texts_are_prepared(tmp_path, real_data):
    prompts = rl(real_data / "mt_ranking_ende_train.parquet", tmp_path / "rl.parquet", cross_lingual=True)
    assert len(prompts) == 2 * 284
    assert sum("from English into German" in prompt.messages[0]["content"] for prompt in prompts) == 284
