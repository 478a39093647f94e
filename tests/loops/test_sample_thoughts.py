"""`plaudit sample` from thinking models, in this process and on a server: prefill, stop strings, thought and answer."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_group
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.loops import sample as loop
from plaudit.prepare.zero_model import make_zero_model
from plaudit.recipe.limits import ModelLimits
from plaudit.response_files import Longcot
from support.fault_server import FaultServer
from support.rows import prompt_rows, write_jsonl

ZERO, WARM = Longcot("<response>", "</response>", "<think>"), Longcot("</think>", None, "<think>")
FORMS = {
    "zero": (ZERO, "<think> {} </think>\n<response> {} </response>"),
    "warm": (WARM, "<think>\n{}\n</think>\n\n{}"),
}
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=20).map(str.strip)


@pytest.mark.parametrize("kind", FORMS)
@given(thought=WORDS, answer=WORDS)
def test_a_response_of_the_form_is_split_where_it_was_joined(kind, thought, answer):
    longcot, form = FORMS[kind]
    assert longcot.split(form.format(thought, answer)) == (thought, answer)


@pytest.mark.parametrize(
    ("longcot", "text", "split"),
    [
        (ZERO, "<think> a <response> b", None),
        (ZERO, "<think> a </think> b", None),
        (WARM, "<think> a", None),
        (WARM, "a </think> b </think> c", ("a", "b </think> c")),
        (Longcot(None, None), " a ", ("", "a")),
    ],
)
def test_a_missing_delimiter_leaves_no_answer(longcot, text, split):
    assert longcot.split(text) == split


# In this process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zero_model(tmp_path_factory, tiny_model) -> Path:
    folder = tmp_path_factory.mktemp("zero") / "model"
    make_zero_model(str(tiny_model), folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", prompt_rows()[:4])


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_responses_begin_with_the_marker_and_are_split(tmp_path, plaudit, zero_model, prompts):
    """A random model writes no delimiter: its responses have no answer, and are malformed for `plaudit score`."""
    out = tmp_path / "out.jsonl"
    code, _, err = plaudit("sample", zero_model, prompts, "--out", out, "-n", 2, "--max-new-tokens", 6, "--device", "cpu")
    assert code == 0, err
    for row in rows_of(out):
        for response in row["responses"]:
            assert response["text"].startswith("<think>")
            assert (response["thought"], response["answer"]) == (None, None)
        assert [sample.answer for sample in parse_group(row, "id", "here").samples] == ["", ""]  # pyright: ignore
    # Without a marker the same prompts are continued differently, and nothing is resumed.
    code, _, err = plaudit("sample", zero_model, prompts, "--out", out, "-n", 2, "--max-new-tokens", 6, "--prefill", "")
    assert code == 2
    assert "was made with other settings" in err


def test_the_marker_follows_the_prompt_as_the_template_writes_it(zero_model):
    """As tokens of `Assistant: <think>`, which training sees, and not of `Assistant:<think>`."""
    template = load_template(load_tokenizer(str(zero_model)), None)
    message = [{"role": "user", "content": "Hi"}]
    begun = template.tokenizer.decode([*template.prompt_tokens(message), *template.prefill_tokens("<think>")])
    assert template.render([*message, {"role": "assistant", "content": "<think> a"}]).startswith(begun)
    assert template.prefill_tokens("") == []


def test_a_template_that_begins_thoughts_itself_is_left_alone(tiny_model):
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template = load_template(load_tokenizer(str(tiny_model)), None)
    prefills = type(template)(template.tokenizer, text + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}")
    assert prefills.prefill_tokens("<think>") == []


# On a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(zero_model):
    """It continues a prompt as a trained model would: the first thought is about the prompt."""
    tokenizer = load_tokenizer(str(zero_model))

    def reply(content: str) -> str:
        prompt = tokenizer.decode([int(token) for token in content.split()])
        assert prompt.endswith("</query>\nAssistant: <think>")
        return f" about {prompt.count('?')} </think>\n<response> yes </response>"

    with FaultServer(model="policy") as running:
        running.reply = reply
        yield running


def test_a_served_model_is_sampled_like_one_in_this_process(tmp_path, plaudit, zero_model, prompts, server):
    out = tmp_path / "out.jsonl"
    code, text, err = plaudit(
        "sample", zero_model, prompts, "--out", out, "-n", 3, "--url", server.url, "--temperature", 0.7, "--seed", 5
    )
    assert code == 0, err
    assert text == f"{out}: 4 prompts with 3 responses each\n"
    assert "12 calls, " in err
    rows = rows_of(out)
    assert sorted(row["id"] for row in rows) == [f"prompts.jsonl:{i}" for i in range(1, 5)]
    for row in rows:
        assert [response["answer"] for response in row["responses"]] == ["yes"] * 3
        assert row["responses"][0]["text"].startswith("<think> about 1 </think>")
        assert (row["status"], row["tokens"], row["logprob"]) == (["finished"] * 3, [2] * 3, [None] * 3)
    bodies = [request.body for request in server.requests]
    assert {request.path for request in server.requests} == {"/v1/completions"}
    assert len({body["seed"] for body in bodies}) == 12
    assert all(body["stop"] == ["</response>"] and body["include_stop_str_in_output"] for body in bodies), "from stop.txt"
    assert {body["temperature"] for body in bodies} == {0.7}
    # Another start has nothing to do.
    server.requests.clear()
    assert (
        plaudit("sample", zero_model, prompts, "--out", out, "-n", 3, "--url", server.url, "--temperature", 0.7, "--seed", 5)[0]
        == 0
    )
    assert not server.requests


def test_a_server_that_dies_leaves_complete_prompts_and_the_rest_follows(
    tmp_path, plaudit, zero_model, prompts, server, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(loop, "ModelLimits", partial(ModelLimits, backoff_s=0.01))
    out = tmp_path / "out.jsonl"
    command = ("sample", zero_model, prompts, "--out", out, "-n", 2, "--url", server.url, "--max-sequences", 2)
    server.dies_after = 5
    code, _, err = plaudit(*command)
    assert code == 2
    assert "2 of 4 prompts have no responses: 2 " in err
    assert "run the same command to resume" in " ".join(err.split())
    assert len(rows_of(out)) == 2
    server.dies_after = None
    server.requests.clear()
    server.live()
    code, _, err = plaudit(*command)
    assert code == 0, err
    assert len(server.requests) == 4
    assert len(rows_of(out)) == 4


def test_a_model_without_these_files_gives_plain_texts(tmp_path, plaudit, tiny_model, prompts):
    with FaultServer(model="policy") as server:
        server.reply = lambda content: " words"
        code, _, err = plaudit("sample", tiny_model, prompts, "--out", tmp_path / "o.jsonl", "--url", server.url)
        assert code == 0, err
        assert all("stop" not in request.body for request in server.requests)
    assert {tuple(row["responses"]) for row in Source(tmp_path / "o.jsonl").rows()} == {(" words",)}


@pytest.mark.parametrize("max_model_len", [None, 5000], ids=["unknown context", "known context"])
def test_prompts_longer_than_the_server_s_context_are_left_out_and_counted(tmp_path, plaudit, tiny_model, max_model_len):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("long " * 500, "hi", "hello", "so " * 500)])
    out = tmp_path / "out.jsonl"
    with FaultServer(model="policy") as server:
        server.max_model_len, server.longest_prompt = max_model_len, 200
        command = ("sample", tiny_model, prompts, "--out", out, "-n", 2, "--url", server.url, "--max-sequences", 1)
        for _ in range(2):  # resumed, nothing is left to be answered
            code, text, err = plaudit(*command)
            assert code == 0, err
            assert text == f"{out}: 2 prompts with 2 responses each\n"
            assert "2 of 4 prompts left out, which the server rejects: prompt prompts.jsonl:1 has" in " ".join(err.split())
            assert sorted(row["id"] for row in rows_of(out)) == ["prompts.jsonl:2", "prompts.jsonl:3"]


def test_a_server_on_which_no_prompt_fits_is_an_error_with_a_remedy(tmp_path, plaudit, tiny_model, prompts):
    with FaultServer(model="policy") as server:
        server.fault_for_all = "toolong"
        command = ("sample", tiny_model, prompts, "--out", tmp_path / "out.jsonl", "--url", server.url)
        code, _, err = plaudit(*command)
        assert code == 2
        assert "4 of 4 prompts have no responses: 4 context: " in err
        assert "or lower --max-new-tokens" in " ".join(err.split())
        server.fault_for_all = None
        code, _, err = plaudit(*command, "--max-new-tokens", 8)
        assert code == 0, err


def test_another_model_on_the_server_is_noticed(tmp_path, plaudit, tiny_model, prompts):
    with FaultServer(model="policy") as server:
        command = ("sample", tiny_model, prompts, "--out", tmp_path / "out.jsonl", "--url", server.url)
        assert plaudit(*command, "--max-prompts", 2)[0] == 0
        server.model = "another"
        code, _, err = plaudit(*command)
        assert code == 2
        assert 'server.path: "policy" there, "another" now' in err


def test_with_a_server_the_tokenizer_alone_is_enough(tmp_path, plaudit, tiny_model, prompts):
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer/config.json").exists()
    command = ("sample", tmp_path / "tokenizer", prompts, "--out", tmp_path / "out.jsonl")
    assert "it has no config.json" in plaudit(*command)[2]
    with FaultServer(model="policy") as server:
        code, _, err = plaudit(*command, "--url", server.url)
        assert code == 0, err
    assert len(rows_of(tmp_path / "out.jsonl")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--served-name", "x"], "it belongs to --url"),
        (["--url", "{url}", "--top-k", 5], "a server samples without them"),
        (["--url", "{url}", "--served-name", "other"], "no model other (it serves: policy)"),
        (["--url", "nowhere"], "should look like http://127.0.0.1:8000"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sampled(tmp_path, plaudit, zero_model, prompts, server, options, message):
    given = [str(option).replace("{url}", server.url) for option in options]
    code, _, err = plaudit("sample", zero_model, prompts, "--out", tmp_path / "o.jsonl", *given)
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "o.jsonl").exists()


def test_a_damaged_config_is_named(tmp_path, plaudit, zero_model, prompts):
    shutil.copytree(zero_model, tmp_path / "model")
    (tmp_path / "model/longcot_config.json").write_text('{"longcot_delimiter": "</think>", "start_think_marker": 5}')
    code, _, err = plaudit("sample", tmp_path / "model", prompts, "--out", tmp_path / "o.jsonl")
    assert code == 2
    assert "start_think_marker should be text or null, not 5" in err
