"""Keys: a judge repeats its key in answers, errors, headers and names, and nothing that plaudit writes or prints contains it."""

import asyncio
import base64
import html
import itertools
import json
import socket
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.config import load
from plaudit.errors import PlauditError, RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.redaction import keep_secret, redact, redact_all
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams
from plaudit.reward_models.server_client import ServerClient
from plaudit.types import Failure
from support.processes import Command
from support.raw_server import RawServer, chat, response
from support.recipes import rl_recipe, write_recipe
from support.rows import write_jsonl

VARIABLE = "JUDGE_LOGIN"
"""The name does not say that it holds a key."""
KEY = 'kd7/Qz+81="W\\v~4mPx'
WINDOW = 8
"""This many characters of the key, anywhere, are a leak: half a key is one too."""
ESCAPED = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
"""As JSON may write it; decoded, it is the key."""
FORMS = {
    "the key": KEY,
    "in quotes": f'"{KEY}"',
    "percent-encoded": quote(KEY, safe=""),
    "percent-encoded, lower case": quote(KEY, safe="").replace("%2F", "%2f").replace("%3D", "%3d"),
    "in a path": quote(KEY),
    "in a form": quote_plus(KEY),
    "in JSON": json.dumps(KEY),
    "repr": repr(KEY),
    "HTML": html.escape(KEY),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(KEY.encode()).decode(),
    "Basic, no user": base64.b64encode(f":{KEY}".encode()).decode(),
    "Basic, a user": base64.b64encode(f"me:{KEY}".encode()).decode(),
    "Basic, another": base64.b64encode(f"user:{KEY}".encode()).decode(),
    "base64 of a header": base64.b64encode(f"Authorization: Bearer {KEY}\r\nHost: h".encode()).decode(),
    "in a URL": f"https://user:{quote(KEY, safe='')}@host/v1",
    "in a query": f"https://host/v1?x=1&api_key={quote(KEY, safe='')}",
}


def leaks(text: str) -> list[str]:
    """Pieces of the key, in any form, that the text contains."""
    spellings = [KEY, *(form for name, form in FORMS.items() if name not in ("in a URL", "in a query", "base64 of a header"))]
    pieces = {spelling[i : i + WINDOW] for spelling in spellings for i in range(len(spelling) - WINDOW + 1)}
    return sorted(piece for piece in pieces if piece in text)


@pytest.fixture
def key(monkeypatch) -> str:
    monkeypatch.setenv(VARIABLE, KEY)
    keep_secret(VARIABLE)
    return KEY


# By value ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_a_known_key_is_redacted_in_every_form(key, name):
    text = f"rejected: {FORMS[name]} (try another)"
    assert leaks(redact(text)) == []
    assert redact(text).startswith("rejected: ")
    assert redact(text).endswith(" (try another)")
    assert redact(redact(text)) == redact(text)


def test_what_people_look_at_has_no_key(key):
    assert str(PlauditError(f"no {key}")) == f"no ${VARIABLE}"
    assert Failure("http", f"no {key}").message == f"no ${VARIABLE}"
    assert redact_all({key: [f"a {key}", 5, None, {"b": (key,)}]}) == {
        f"${VARIABLE}": [f"a ${VARIABLE}", 5, None, {"b": [f"${VARIABLE}"]}]
    }


def test_the_environment_is_read_as_it_is_now(monkeypatch):
    """A key that appears, changes or gets another name between two texts is redacted all the same, and a former one is text."""
    first, second = "first-8f2e91c4", "second-71b0d3aa"
    text = f"{first} {second}"
    assert redact(text) == text
    monkeypatch.setenv("SOME_API_KEY", first)
    assert redact(text) == f"$SOME_API_KEY {second}"
    monkeypatch.setenv("SOME_API_KEY", second)
    assert redact(text) == f"{first} $SOME_API_KEY"
    monkeypatch.delenv("SOME_API_KEY")
    monkeypatch.setenv("OTHER_API_KEY", first)  # as many variables as before
    assert redact_all([text, ""]) == [f"$OTHER_API_KEY {second}", ""]


keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Z"]), min_size=12, max_size=40)


@given(keys, st.text(max_size=20), st.binary(max_size=5))
def test_any_key_is_redacted(secret, around, user):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, secret)
        keep_secret(VARIABLE)
        basic = base64.b64encode(user + secret.encode()).decode()
        for form in (secret, quote(secret, safe=""), json.dumps(secret), basic):
            assert secret not in redact(f"{around}{form}{around}")
            assert form not in redact(f"{around} {form} {around}")


@pytest.mark.parametrize(
    "text",
    [
        "https://host:8000/v1/models",
        "what is a?b=c&key=3",
        "ssh://git@host/repository",
        "a b64 aGVsbG8gd29ybGQ=",
        "user@host",
        "1/2?",
    ],
)
def test_ordinary_text_stays_as_it_is(key, text):
    assert redact(text) == text


def test_long_text_is_redacted_in_one_pass(key):
    """Runs of base64 are searched once, not once for every character."""
    run = "A" * 200_000
    assert redact(run) == run
    hidden = base64.b64encode(f"me:{key}".encode()).decode().rstrip("=")
    assert redact(f"{run}{hidden}{run} and {hidden} {run}") == f"${VARIABLE} and ${VARIABLE} {run}"


# In a recipe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://me:{}@127.0.0.1:8000",
        "http://{}@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1?api_key={}",
        "http://127.0.0.1:8000/v1?x={}",
        "http://127.0.0.1:8000/v1#{}",
        "ftp://me:{}@host",
    ],
)
@pytest.mark.parametrize("secret", ["3vZq8LmT2w", quote(KEY, safe="")])
def test_a_key_in_a_url_is_refused_and_not_shown(plaudit, tmp_path, url, secret):
    model = {"placement": "server", "url": url.format(secret)}
    file = write_recipe(tmp_path / "r.yaml", {"rewards": [{"kind": "judge", "model": model}]})
    for command in (("config", file), ("config", file, "--explain"), ("score", file, file, "--out", tmp_path / "out.jsonl")):
        code, out, err = plaudit(*command)
        assert code == 2
        assert "rewards.0.model.url" in err
        assert "credential" in err
        assert secret not in out + err
        assert leaks(out + err) == []


def test_a_key_in_another_setting_is_refused(key, tmp_path):
    model = {"placement": "server", "url": "http://127.0.0.1:8000", "credential": VARIABLE}
    tree = {"rewards": [{"kind": "judge", "system": f"Your key is {key}.", "model": model}]}
    with pytest.raises(RecipeError, match=r"rewards\.0\.system: keys and passwords do not belong in a recipe") as caught:
        load(write_recipe(tmp_path / "r.yaml", tree))
    assert leaks(str(caught.value)) == []


# A judge that repeats it ---------------------------------------------------------------------------------------------


def echo(status: str, body: Any) -> bytes:
    """A response with the key in its headers too."""
    address = f"http://{quote(KEY, safe='')}@h/?key={KEY}"
    headers = {"X-Key": KEY, "WWW-Authenticate": KEY, "Location": address, "Set-Cookie": f"a,{KEY}={KEY}; {KEY}"}
    return response(body, status, "".join(f"{name}: {value}\r\n" for name, value in headers.items()))


def ask(server: RawServer, **limits: Any) -> Answer:
    async def run() -> Answer:
        model = RewardModel(placement="server", url=(server.url,), credential=VARIABLE)
        client = ServerClient(model, ModelLimits(**{"retries": 0, **limits}))
        try:
            await client.open()
            assert leaks(client.name + repr(client.info())) == []
            [answer] = await client.generate([GenerationRequest([{"role": "user", "content": "?"}])], SamplingParams(16))
            return answer
        finally:
            await client.close()

    return asyncio.run(run())


def padded(form: str, before: int) -> str:
    return "x" * before + " " + form + " y" * 200


ERRORS: dict[str, bytes] = {
    **{f"{status}, {name}": echo(f"{status} No", padded(form, 0)) for status in (400, 401, 500) for name, form in FORMS.items()},
    **{f"cut after {n}": echo("400 No", padded(KEY, 299 - n)) for n in range(1, len(KEY) + 2)},
    **{f"JSON, cut after {n}": echo("400 No", {"error": {"message": padded(KEY, 299 - n)}}) for n in (1, 5, 9, 15)},
    "escaped in JSON": echo("400 No", f'{{"error": {{"message": "got {ESCAPED}"}}}}'),
    "as a detail": echo("422 No", {"detail": [{"loc": KEY, "msg": f"got {KEY}"}]}),
    "moved": echo("302 Found", ""),
    "no JSON": echo("200 OK", f"got {KEY}"),
    "other JSON": echo("200 OK", {"got": KEY}),
    "the reason": response("", f"400 got {KEY}"),
    "no HTTP": f"{KEY} {KEY}\r\n\r\n".encode(),
    "a bad header": f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(),
    "a bad encoding": response("{}", headers=f"Content-Encoding: gzip\r\nX: {KEY}\r\n"),
    "too large": echo("400 No", " " * (2**16 - 10) + KEY * 3),
}


@pytest.mark.parametrize("name", ERRORS)
def test_no_failure_contains_the_key(key, name):
    with RawServer(lambda path, body: None if path == "/v1/models" else [ERRORS[name]]) as server:
        answer = ask(server)
    assert answer.failure is not None
    assert leaks(answer.failure.message) == []


@pytest.mark.parametrize("form", [*FORMS.values(), ESCAPED], ids=[*FORMS, "escaped"])
def test_no_answer_contains_the_key(key, form):
    """It may be quoted in a prompt for another server."""
    body = json.dumps(chat("so @ says the key")).replace("@", form if form == ESCAPED else json.dumps(form)[1:-1])
    with RawServer(lambda path, _: None if path == "/v1/models" else [response(body)]) as server:
        answer = ask(server)
    assert answer.text is not None
    assert leaks(answer.text) == []
    assert answer.text.startswith("so ")
    assert answer.text.endswith(" says the key")


@pytest.mark.parametrize(
    "models",
    [
        echo("200 OK", {"data": [{"id": KEY}, {"id": f"my {KEY}"}]}),
        echo("401 No", f"got {KEY}"),
        echo("500 No", f"got {KEY}"),
        echo("200 OK", f"got {KEY}"),
    ],
    ids=["names", "401", "500", "no JSON"],
)
def test_no_error_about_the_list_of_models_contains_the_key(key, models):
    with RawServer(lambda path, body: [models]) as server, pytest.raises(RecipeError) as caught:
        ask(server)
    assert leaks(str(caught.value)) == []


# Everything that commands write --------------------------------------------------------------------------------------


class Echo(RawServer):
    """Answers in turn with numbers and with faults, and repeats the key in all of them."""

    def __init__(self, faults: Iterable[bytes]):
        super().__init__(self._reply)
        self._faults = itertools.cycle(faults)

    def _reply(self, path: str, body: dict[str, Any]) -> list[bytes]:
        if path == "/v1/models":
            return [echo("200 OK", {"data": [{"id": f"judge-{KEY}", "root": KEY, "max_model_len": 4096}]})]
        if self.requests % 3 == 0:
            return [next(self._faults)]
        score = 3 + self.requests % 5
        named = json.dumps({"score": score, KEY: 1, quote(KEY): 2})[:-1] + f', "{ESCAPED}!": 4}}'
        said = f"You called me with {' '.join(FORMS.values())}.\n{named}"
        return [echo("200 OK", chat(said, system_fingerprint=KEY, usage={"prompt_tokens": 9, "completion_tokens": 4}))]


def judge(server: RawServer, **settings: Any) -> dict[str, Any]:
    model = {"placement": "server", "url": server.url, "credential": VARIABLE}
    limits = {"retries": 0, "unreadable_retries": 4, "backoff_s": 0.0, "give_up_after": None}
    return {"kind": "judge", "parser": "json", "model": model, "limits": limits, "scale": 0.1, **settings}


def written_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file as text: its bytes, and a table's rows."""
    for file in folder.rglob("*"):
        if file.is_file():
            yield file, file.read_bytes().decode("latin-1")
            if file.suffix == ".parquet":
                yield (
                    file,
                    "\n".join(str(value) for row in pq.read_table(file).to_pylist() for item in row.items() for value in item),
                )


def assert_no_key_in(folder: Path, *printed: str) -> None:
    files = list(written_in(folder))
    assert files
    assert {str(file.relative_to(folder)): found for file, text in files if (found := leaks(text))} == {}
    assert leaks("\n".join(printed)) == []


FAULTS = [ERRORS[name] for name in ("500, the key", "400, in JSON", "escaped in JSON", "moved", "no JSON", "other JSON", "no HTTP")]


@pytest.mark.slow
def test_nothing_that_a_run_writes_contains_the_key(key, tmp_path, plaudit, tiny_model, prompts_file):
    run = {"trackers": ["tensorboard", "mlflow"], "max_steps": 2}
    with Echo(FAULTS) as server:
        reward = judge(server, max_failure_rate=1.0)  # a request that is rejected is not repeated
        recipe = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward, run=run, data={"val": str(prompts_file)})
        file = write_recipe(tmp_path / "rl.yaml", recipe)
        outcomes = [plaudit(*command, file) for command in (("config",), ("config", "--explain"), ("doctor",), ("rl",))]
    codes, outs, errs = zip(*outcomes, strict=True)
    assert codes == (0, 0, 0, 0), errs
    assert "$JUDGE_LOGIN" in "".join(text for file, text in written_in(tmp_path) if file.suffix == ".parquet")
    assert_no_key_in(tmp_path, *outs, *errs)


@pytest.mark.slow
def test_nothing_that_a_failing_run_writes_contains_the_key(key, tmp_path, plaudit, tiny_model, prompts_file):
    with RawServer(lambda path, body: None if path == "/v1/models" else [FAULTS[0]]) as server:
        file = write_recipe(tmp_path / "rl.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / "run", judge(server)))
        code, *words = plaudit("rl", file)
    assert code == 2
    assert list((tmp_path / "run" / "failures").iterdir())
    assert_no_key_in(tmp_path, *words)


ROWS = [{"prompt": f"What is {i} + 1?", "responses": [str(i), str(i + 1)], "ground_truth": str(i + 1)} for i in range(12)]


def test_nothing_that_score_and_audit_write_contains_the_key(key, tmp_path, plaudit):
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with Echo(FAULTS) as server:
        file = write_recipe(tmp_path / "r.yaml", {"rewards": [judge(server, limits={"retries": 0, "unreadable_retries": 0})]})
        scored = plaudit("score", file, rows, "--out", tmp_path / "out.jsonl", "--details")
        audited = plaudit("audit", file, rows, "--out", tmp_path / "audit")
    assert scored[0] == 1, scored  # a third of the calls fails, and the cache is kept
    assert (tmp_path / "out.jsonl.scores.sqlite").exists()
    assert "$JUDGE_LOGIN" in (tmp_path / "out.jsonl").read_text()
    assert (tmp_path / "audit" / "audit.html").exists(), audited
    assert_no_key_in(tmp_path, *map(str, (*scored, *audited)))


FUNCTION = f"""
import os

def compute_score(solution_str):
    key = os.environ["{VARIABLE}"]
    if solution_str == "5":
        raise ValueError(f"HTTP 500: {{key}}")
    return {{"score": 1.0, key: 2.0, "said": [key, {{key: key}}]}}
"""


def test_nothing_that_a_function_returns_or_raises_contains_the_key(key, tmp_path, plaudit):
    """A user's function may call a judge by itself."""
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "reward.py").write_text(FUNCTION)
    function = {"kind": "function", "path": str(tmp_path / "reward.py"), "workers": 1, "max_failure_rate": 1.0}
    file = write_recipe(tmp_path / "r.yaml", {"rewards": [function]})
    code, out, err = plaudit("score", file, rows, "--out", tmp_path / "out.jsonl", "--details")
    assert code == 1, err
    assert f'"${VARIABLE}"' in (tmp_path / "out.jsonl").read_text()
    assert_no_key_in(tmp_path, out, err)


@pytest.mark.slow
def test_nothing_that_a_service_returns_or_prints_contains_the_key(key, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with Echo(FAULTS) as server:
        file = write_recipe(tmp_path / "r.yaml", {"rewards": [judge(server, limits={"retries": 0, "unreadable_retries": 0})]})
        command = Command("serve", file, "--port", port, cwd=tmp_path)
        command.wait_for(lambda: f":{port}" in command.output and "ready" in command.output)
        body = json.dumps({"items": ROWS, "details": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/score", body, {"Content-Type": "application/json"})
        answers = [urllib.request.urlopen(request).read().decode()]
        answers += [urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}").read().decode() for path in ("rewards", "metrics")]
        command.kill()
    assert "$JUDGE_LOGIN" in answers[0]
    assert '"cause":"http"' in answers[0].replace(" ", "")
    assert_no_key_in(tmp_path, command.output, *answers)
