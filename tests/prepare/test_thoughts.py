"""`plaudit prepare thoughts`: a server's answers become rows in the order of the prompts; no answer is called for twice."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.rows import read_rows
from plaudit.prepare.english import is_english
from plaudit.prepare.thoughts import REQUEST, TAGS, has_tags, split_thought
from plaudit.reward_models.many_calls import REJECTIONS_IN_A_ROW
from support.fault_server import FaultServer
from support.processes import Command
from support.rows import write_jsonl

QUICKLY = ("limits.backoff_s=0.01", "limits.retries=1")


def good(prompt: str) -> str:
    question = prompt.removesuffix(f"\n\n{REQUEST}")
    return f" <think>\nabout {question}\n</think>\n<response>\nreply to {question}\n</response>\n"


@pytest.fixture
def writer():
    with FaultServer(model="writer") as server:
        server.reply = good
        yield server


def prompts(tmp_path: Path, *texts: str) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text, "id": f"q{i}"} for i, text in enumerate(texts)])


@pytest.fixture
def thoughts(tmp_path, plaudit, writer):
    def run(file: Path, *options: object, out: str = "out.jsonl") -> tuple[int, str, str]:
        return plaudit("prepare", "thoughts", file, "--out", tmp_path / out, "--url", writer.url, *QUICKLY, *options)

    return run


# Answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<think>a</think><response>b</response>", ("a", "b")),
        ("\n<think> a\n</think>\n\n<response>\nb\n", ("a", "b")),
        ("<think>a<response>b</response>", ("a", "b")),
        ("<think>a</think>so:<response>b</response> bye", ("a", "b")),
        ("Sure! <think>a</think><response>b</response>", None),
        ("<think>a</think>b", None),
        ("<response>b</response>", None),
        ("<think>a<think>b</think><response>c</response>", None),
        ("<think>a</think></think><response><response>c</response>", None),
        ("<think>a<response>b</think>c</response>", None),
        ("<think> </think><response>b</response>", None),
        ("<think>a</think><response> </response>", None),
        ("", None),
    ],
)
def test_only_answers_of_the_requested_form_are_accepted(text, read):
    assert split_thought(text) == read


PIECES = st.lists(st.sampled_from([*TAGS, "a", " ", "\n", "</", "think>", "<response"]), max_size=14).map("".join)


@given(PIECES)
def test_whatever_is_accepted_has_no_tags_and_comes_from_the_text(text):
    read = split_thought(text)
    if read is not None:
        thought, response = read
        assert not has_tags(thought, response)
        assert thought == thought.strip() != ""
        assert response == response.strip() != ""
        assert text.index(thought) < text.rindex(response)
        assert split_thought(f"<think>{thought}</think><response>{response}</response>") == read


def test_rows_are_in_the_order_of_the_prompts(tmp_path, thoughts, writer):
    writer.latency_s = 0.01
    conversation = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "old answer"}]
    rows = [{"id": f"q{i}", "prompt": f"question {i}", "source": "mine"} for i in range(12)]
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"messages": conversation}, *rows, rows[3]])
    code, out, err = thoughts(file, "model.prompt_price=1", "model.answer_price=2")
    assert code == 0, err
    written = list(read_rows(tmp_path / "out.jsonl"))
    assert [row["id"] for row in written] == ["prompts.jsonl:1", *(row["id"] for row in rows)]
    assert written[0] == {
        "id": "prompts.jsonl:1",
        "messages": conversation[:1],
        "thought": "about first",
        "response": "reply to first",
        "source": "prompts.jsonl",
    }
    assert {row["source"] for row in written[1:]} == {"mine"}
    assert "13 rows of 14 prompts; 1 left out: the id of an earlier row; 13 calls, " in out
    assert ", cost " in out
    assert all(content.endswith(REQUEST) for content in writer.contents())


def test_without_thoughts_the_prompt_is_sent_as_it_is(tmp_path, thoughts, writer):
    writer.reply = lambda prompt: "<think>no</think>" if "tags" in prompt else f" {prompt}! "
    code, out, err = thoughts(prompts(tmp_path, "hello", "with tags"), "--without-thoughts", out="out.parquet")
    assert code == 0, err
    [row] = read_rows(tmp_path / "out.parquet")
    assert row == {"id": "q0", "messages": [{"role": "user", "content": "hello"}], "response": "hello!", "source": "prompts.jsonl"}
    assert "1 left out: nothing, or tags of thoughts, in 2 tries" in out
    assert sorted(writer.contents()) == ["hello", "with tags", "with tags"]


def test_an_answer_of_another_form_is_requested_again_once(tmp_path, thoughts, writer):
    said: list[str] = []

    def reply(prompt: str) -> str:
        said.append(prompt)
        return good(prompt) if "first" in prompt or ("second" in prompt and said.count(prompt) == 2) else "no tags"

    writer.reply = reply
    code, out, _ = thoughts(prompts(tmp_path, "first", "second", "never"), "--tries", 2)
    assert code == 0
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == ["q0", "q1"]
    assert "2 rows of 3 prompts; 1 left out: the form was not kept in 2 tries; 5 calls" in out
    seeds = [request.body["seed"] for request in writer.requests if request.body["messages"][0]["content"].startswith("never")]
    assert len(set(seeds)) == 2, "a second try with the seed of the first would repeat it"
    # A third try for what is missing: everything else is known.
    code, out, _ = thoughts(prompts(tmp_path, "first", "second", "never"), "--tries", 3)
    assert code == 0
    assert "left out: the form was not kept in 3 tries; 1 calls" in out


def test_an_answer_that_was_cut_is_not_used(tmp_path, thoughts, writer):
    code, out, _ = thoughts(prompts(tmp_path, "long story", "short"))
    assert code == 0
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == ["q1"]
    assert "1 left out: cut at sampling.max_new_tokens in 2 tries" in out


def test_prompts_in_other_languages_can_be_left_out(tmp_path, thoughts):
    texts = ("What is the capital of France?", "Was ist die Hauptstadt von Frankreich?", "法国的首都是哪里?", "2 + 2 = ?")
    code, out, _ = thoughts(prompts(tmp_path, *texts), "--english")
    assert code == 0
    assert "2 rows of 4 prompts; 2 left out: not in English" in out


@pytest.mark.parametrize(
    "text", ["", "12", "def f(x): return x + y", "Write a poem about the sea.", "Bonjour", "Σ x²", "α + β = π"]
)
def test_text_that_shows_no_other_language_passes_as_english(text):
    assert is_english(text)


@pytest.mark.parametrize("text", ["Напиши", "好", "καλημέρα, x²", "Schreibe ein Gedicht"])
def test_text_in_another_language_is_not_english(text):
    assert not is_english(text)


# Resuming ------------------------------------------------------------------------------------------------------------


def test_nothing_is_called_twice_after_a_failure(tmp_path, thoughts, writer):
    texts = [f"question {i}" for i in range(5)] + ["500 always"]
    file = prompts(tmp_path, *texts)
    code, out, err = thoughts(file)
    assert code == 1
    assert "5 rows of 6 prompts; 1 without an answer (1 http: " in out
    assert "--allow-failures" in err
    before = (tmp_path / "out.jsonl").read_bytes()
    writer.requests.clear()
    code, out, err = thoughts(file, "--allow-failures", "limits.retries=0")
    assert code == 0
    assert "has answers to 5 of 6 prompts; resuming with the rest" in err
    assert [content.split("\n")[0] for content in writer.contents()] == ["500 always"]
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_kill_9_loses_no_answer(tmp_path, thoughts, writer):
    file = prompts(tmp_path, *(f"question {i}" for i in range(30)))
    journal = tmp_path / "out.jsonl.answers.jsonl"
    writer.latency_s = 0.1
    options = ["--out", tmp_path / "out.jsonl", "--url", writer.url, "limits.max_concurrent_calls=2"]
    process = Command("prepare", "thoughts", file, *options)
    process.wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 4)
    process.kill()
    kept = {json.loads(line)["id"] for line in journal.read_bytes().split(b"\n")[:-1]}
    assert len(kept) < 30
    with journal.open("ab") as end:
        end.write(b'{"id": "q29", "text": "<thi')  # a line that the kill cut short
    assert not (tmp_path / "out.jsonl").exists()
    writer.requests.clear()
    writer.latency_s = 0.0
    code, _, err = thoughts(file)
    assert code == 0, err
    assert f"has answers to {len(kept)} of 30 prompts; resuming with the rest" in err
    assert len(writer.requests) == 30 - len(kept)
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [f"q{i}" for i in range(30)]


def test_prompts_that_the_server_rejects_do_not_stop_the_others(tmp_path, thoughts, writer):
    """They are settled: later starts neither call for them again nor fail because of them."""
    texts = [f"400 content {i}" for i in range(12)] + ["toolong this"] + [f"question {i}" for i in range(5)]
    file = prompts(tmp_path, *texts)
    code, out, err = thoughts(file, "limits.max_concurrent_calls=1")
    assert code == 0, err
    assert "5 rows of 18 prompts; 12 left out: rejected by the server; 1 left out: longer than the model's context; " in out
    journal = [json.loads(line) for line in (tmp_path / "out.jsonl.answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in journal if "temperature must not be negative" in row["rejected"]] == [f"q{i}" for i in range(12)]
    writer.requests.clear()
    assert thoughts(file)[0] == 0
    assert not writer.requests


def test_a_server_that_rejects_every_call_settles_nothing(tmp_path, thoughts, writer):
    """It began to in the middle: prompts that it may answer tomorrow are not left out."""
    file = prompts(tmp_path, *(f"question {i}" for i in range(300)))
    one = ("limits.max_concurrent_calls=1",)
    assert thoughts(file, "--max-prompts", 3, *one)[0] == 0
    writer.requests.clear()
    writer.fault_for_all = "400"
    code, _, err = thoughts(file, *one)
    assert code == 2
    assert len(writer.requests) == REJECTIONS_IN_A_ROW
    assert "no further calls are made: 100 rejected: " in err
    assert ".." not in err.replace("...", "")
    code, out, err = thoughts(file, "--allow-failures", *one)
    assert code == 0, err
    assert "3 rows of 300 prompts; 297 without an answer (100 rejected: " in out
    writer.fault_for_all = None
    assert "300 rows of 300 prompts" in thoughts(file)[1]


def test_a_prompt_that_is_too_long_is_no_answer(tmp_path, thoughts, writer):
    """A server that rejects every other call settles nothing because of it."""
    writer.max_model_len = 100_000
    file = prompts(tmp_path, *(f"400 content {i}" for i in range(3)), "toolong this")
    code, _, err = thoughts(file, "limits.max_concurrent_calls=1")
    assert code == 2
    assert "no rows could be made (0 rows of 4 prompts; 4 without an answer (3 rejected: " in err
    assert "1 context: prompt q3 is longer than the model's context" in err
    assert not (tmp_path / "out.jsonl.answers.jsonl").exists()


# Errors --------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_stops_the_command_soon(tmp_path, thoughts, writer):
    file = prompts(tmp_path, *(f"question {i}" for i in range(300)))
    writer.dies_after = 20
    code, _, err = thoughts(file, "limits.max_concurrent_calls=4", "limits.retries=0")
    assert code == 2
    assert "no further calls are made: " in err
    assert "nothing listens there" in err
    assert "run the same command to resume" in err
    assert ".." not in err.replace("...", "")
    writer.dies_after = None
    writer.requests.clear()
    writer.live()
    code, _, err = thoughts(file, "limits.retries=0")
    assert code == 0, err
    assert len(writer.requests) == 280


def test_a_server_that_is_down_is_reported_at_once(tmp_path, plaudit, writer):
    writer.die()
    code, _, err = plaudit("prepare", "thoughts", prompts(tmp_path, "a"), "--out", tmp_path / "o.jsonl", "--url", writer.url)
    assert code == 2
    assert "nothing listens there" in err
    assert not list(tmp_path.glob("o.jsonl*"))


def test_a_wrong_key_is_reported_with_the_variable_s_name(tmp_path, plaudit, monkeypatch):
    monkeypatch.setenv("WRITER_KEY", "wrong-key-0123456789")
    with FaultServer(key="right-key-0123456789") as server:
        arguments = ("prepare", "thoughts", prompts(tmp_path, "a"), "--out", tmp_path / "o.jsonl", "--url", server.url)
        code, _, err = plaudit(*arguments, "--credential", "WRITER_KEY")
        assert code == 2
        assert "The key in WRITER_KEY is not accepted" in err
        assert "wrong-key" not in err
        monkeypatch.delenv("WRITER_KEY")
        assert "the environment variable WRITER_KEY" in plaudit(*arguments, "--credential", "WRITER_KEY")[2]
        assert "export JUDGE_KEY" in plaudit(*arguments, "--credential", "sk-0123456789abcdef0123456789")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "out.csv"], "should end with .jsonl or .parquet"),
        (["model.pth=x"], "model.pth is not a setting. Did you mean model.path?"),
        (["sampling.temperature=hot"], "sampling.temperature should be"),
        (["--url", "localhost:8000"], "should look like http://127.0.0.1:8000"),
        (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_mistakes_are_reported_before_anything_is_called(tmp_path, plaudit, writer, options, message):
    code, _, err = plaudit(
        "prepare", "thoughts", prompts(tmp_path, "a"), "--out", tmp_path / "o.jsonl", "--url", writer.url, *options
    )
    assert code == 2
    assert message in err
    assert not writer.requests


def test_answers_of_other_settings_are_not_mixed(tmp_path, thoughts):
    file = prompts(tmp_path, "a", "b")
    assert thoughts(file)[0] == 0
    code, _, err = thoughts(file, "sampling.temperature=0.5")
    assert code == 2
    assert "sampling.temperature: 1.0 there, 0.5 now" in err
    (tmp_path / "other.jsonl").write_text("mine\n")
    code, _, err = thoughts(file, out="other.jsonl")
    assert code == 2
    assert "choose another" in err


def test_rows_without_a_prompt_are_named(tmp_path, thoughts):
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"prompt": 5}])
    code, _, err = thoughts(file)
    assert code == 2
    assert "prompts.jsonl: row 2" in err
    (tmp_path / "empty.jsonl").touch()
    assert "the file is empty" in thoughts(tmp_path / "empty.jsonl")[2]
