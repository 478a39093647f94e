"""plaudit's rewards inside verl, TRL and OpenRLHF. The slow tests run these trainers' own code in environments of their own."""

import asyncio
import json
import math
import os
import pickle
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plaudit.adapters import openrlhf, trl, verl
from plaudit.adapters.scorer import ScoreMissing, shared_scorer
from plaudit.errors import PlauditError
from support.paths import REPOSITORY
from support.recipes import write_recipe
from support.rows import prompt_rows

# Fails on every text that holds a "7"; else 1 for the ground truth, and how long the text is.
MOODY = """
def compute_score(solution_str, ground_truth):
    if "7" in solution_str:
        raise ValueError("I do not like sevens")
    return {"score": float(solution_str.strip() == str(ground_truth)), "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def moody(tmp_path_factory):
    """Settings of a reward that fails at times."""
    path = tmp_path_factory.mktemp("moody") / "moody.py"
    path.write_text(MOODY)
    return {"kind": "function", "name": "moody", "path": str(path), "workers": 1, "timeout_s": 60}


@pytest.fixture
def recipe(tmp_path):
    def write(*rewards: dict, name: str = "rewards") -> str:
        return str(write_recipe(tmp_path / f"{name}.yaml", {"rewards": list(rewards)}))

    return write


# TRL -----------------------------------------------------------------------------------------------------------------


def test_trl_gets_a_value_for_each_completion_and_none_for_a_failure(recipe, moody):
    function = trl.reward_function(recipe(moody))
    assert function.__name__ == "plaudit"
    prompts = ["1 + 1", "1 + 1", "3 + 4", "3 + 4"]
    logged = {}
    values = function(
        prompts=prompts,
        completions=["2", "3", "8", "7"],
        completion_ids=[[5], [6], [7], [8]],
        solution=["2", "2", "7", "7"],
        trainer_state=object(),
        log_metric=logged.__setitem__,
    )
    assert values == [1.0, 0.0, 0.0, None]
    assert logged["plaudit/moody"] == pytest.approx(1 / 3)  # over the three that have a value
    assert (logged["plaudit/failed"], logged["plaudit/malformed"]) == (0.25, 0.0)


@pytest.mark.parametrize(
    "columns",
    [
        {"solution": ["2"]},
        {"answer": ["2"]},
        {"ground_truth": ["2"]},
        {"reward_model": [{"ground_truth": "2", "style": "rule"}], "answer": ["an explanation"]},
    ],
)
def test_trl_columns_that_hold_the_ground_truth(recipe, columns):
    messages = [{"role": "user", "content": "1 + 1"}]
    said = [{"role": "assistant", "content": "2"}]
    assert trl.reward_function(recipe({"kind": "exact"}))([messages], [said], **columns) == [1.0]


def test_trl_repeats_of_a_prompt_are_one_group(recipe):
    """Two groups, of values (1, 0) and (0, 0, 1): each less its own mean, over its own deviation."""
    function = trl.reward_function(recipe({"kind": "exact", "normalise": "group"}))
    values = function(["a", "a", "b", "b", "b"], ["x", "y", "x", "y", "z"], ground_truth=["x", "x", "z", "z", "z"])
    half, third = 1 / 2 / math.sqrt(1 / 2), 1 / 3 / math.sqrt(1 / 3)
    assert values == pytest.approx([half, -half, -third, -third, 2 * third], abs=1e-4)


def test_trl_other_columns_reach_the_reward(recipe):
    rewards = [
        {"kind": "exact", "name": "german", "when": {"lang": "de"}},
        {"kind": "exact", "name": "others", "when": {"lang": "fr"}, "weight": 5.0},
    ]
    values = trl.reward_function(recipe(*rewards))(["a", "b"], ["x", "x"], answer=["x", "x"], lang=["de", "fr"])
    assert values == [1.0, 5.0]


def test_trl_function_can_be_sent_to_another_process(recipe):
    function = pickle.loads(pickle.dumps(trl.reward_function(recipe({"kind": "exact"}), name="mine")))
    assert (function.__name__, function(["a"], ["x"], answer=["x"])) == ("mine", [1.0])


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("as it is", "as it is"),
        ([{"role": "assistant", "content": "said"}], "said"),
        (
            [{"role": "assistant", "content": ""}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "so 4"}],
            "so 4",
        ),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([], ""),
    ],
)
def test_trl_text_of_a_completion(completion, text):
    assert trl.text_of(completion) == text


# verl ----------------------------------------------------------------------------------------------------------------


def test_verl_function_gives_parts_under_fixed_names(recipe, moody):
    rewards = recipe({"kind": "exact", "when": {"data_source": "sums"}}, {**moody, "weight": 0.5})
    assert verl.compute_score("sums", "2", "2", {"index": 0}, rewards=rewards, reward_router_address="unused") == {
        "score": 1.5,
        "exact": 1.0,
        "moody": 1.0,
        "malformed": 0.0,
    }
    other = asyncio.run(verl.compute_score_async("other", "2", "3", None, rewards=rewards))
    assert list(other) == ["score", "exact", "moody", "malformed"]
    assert (other["score"], math.isnan(other["exact"]), other["moody"]) == (0.0, True, 0.0)


def test_verl_failure_is_raised_and_never_zero(recipe, moody):
    rewards = recipe(moody)
    with pytest.raises(ScoreMissing, match=r"'moody' failed \(exception: ValueError: I do not like sevens.*on_failure"):
        verl.compute_score("sums", "7", "7", {}, rewards=rewards)
    stated = recipe({**moody, "on_failure": -1.0}, name="stated")
    assert verl.compute_score("sums", "7", "7", {}, rewards=stated)["score"] == -1.0
    unmatched = recipe({"kind": "exact", "when": {"data_source": "sums"}}, name="unmatched")
    with pytest.raises(ScoreMissing, match="no reward's `when` matches"):
        verl.compute_score("prose", "7", "7", {}, rewards=unmatched)


def test_verl_numpy_values_become_plain():
    import numpy as np

    given = {"a": np.array(["x", "y"]), "b": np.float32(0.5), "c": [np.int64(3)], "d": {"e": np.array([[1, 2]])}}
    assert verl.plain(given) == {"a": ["x", "y"], "b": 0.5, "c": [3], "d": {"e": [[1, 2]]}}


@pytest.mark.parametrize("ask", [lambda r: verl.compute_score("", "2", "2", {}, rewards=r), openrlhf.application])
def test_group_rewards_are_refused_where_samples_come_one_by_one(recipe, ask):
    with pytest.raises(PlauditError, match="'exact': normalise is group, but"):
        ask(recipe({"kind": "exact", "normalise": "group"}))


def test_many_callers_share_a_scorer_and_one_bad_row_hurts_nobody_else(recipe):
    shared = shared_scorer(recipe({"kind": "exact"}))
    rows = [{"prompt": "", "response": str(i), "ground_truth": str(i - i % 2)} for i in range(200)]
    rows[50] = {"prompt": "", "response": 7}

    def ask(row: dict) -> object:
        try:
            return shared.submit([row]).result()[0]["reward"]
        except PlauditError as error:
            return str(error)

    with ThreadPoolExecutor(16) as pool:
        values = list(pool.map(ask, rows))
    assert "should be text" in str(values.pop(50))
    assert values == [float(i % 2 == 0) for i in range(200) if i != 50]


# OpenRLHF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(recipe):
    """Starts the server as a user does; its address."""
    started = []

    def start(*rewards: dict, options: tuple[str, ...] = ()) -> str:
        command = [sys.executable, "-m", "plaudit.adapters.openrlhf", recipe(*rewards), "--port", "0", *options]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=environment
        )
        started.append(process)
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                return found[1]
        pytest.fail(f"the server did not start: {output}")

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=100)


def post(url: str, payload: object) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_openrlhf_server_answers_as_openrlhf_asks(serve, moody):
    url = serve(moody, {"kind": "exact", "weight": 0.5, "when": {"data_source": "sums"}}, options=("--end-token", "<stop>"))
    start = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    labels = ["2", {"ground_truth": "2", "data_source": "sums"}, "3"]
    endings = ["2<|im_end|>\n", "2", "2<stop><|endoftext|>"]
    payload = {"query": [start + end for end in endings], "prompts": [start] * 3, "labels": labels}
    # A label that is no object has no data_source, so the second reward has nothing to say.
    assert post(f"{url}/get_reward", payload) == (
        200,
        {
            "rewards": [1.0, 1.5, 0.0],
            "scores": [1.0, 1.5, 0.0],
            "extra_logs": {"moody": [1.0, 1.0, 0.0], "malformed": [0.0, 0.0, 0.0]},
        },
    )
    status, answer = post(f"{url}/get_reward", {"query": [start + "7"], "prompts": [start], "labels": ["7"]})
    assert status == 500
    assert "I do not like sevens" in answer["error"]
    for wrong in ({}, [], {"query": ["a"], "prompts": [], "labels": []}, {"query": ["a"], "prompts": ["b"], "labels": [""]}):
        assert post(f"{url}/get_reward", wrong)[0] == 400
    with urllib.request.urlopen(f"{url}/health", timeout=60) as health:
        assert json.loads(health.read()) == {"rewards": ["moody", "exact"]}


def test_openrlhf_server_does_not_start_with_a_broken_recipe(recipe):
    file = recipe({"kind": "exact", "wieght": 1})
    done = subprocess.run(
        [sys.executable, "-m", "plaudit.adapters.openrlhf", file], capture_output=True, text=True, cwd=REPOSITORY, timeout=280
    )
    assert (done.returncode, "wieght is not a setting" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_openrlhf_local_function(recipe, moody):
    reward_func = openrlhf.reward_function(recipe(moody))
    answer = reward_func(["ask: 2</s>", "ask: 3"], ["ask: ", "ask: "], ["2", "2"])
    assert (answer["rewards"].tolist(), answer["scores"].tolist()) == ([1.0, 0.0], [1.0, 0.0])
    assert answer["extra_logs"]["moody"].tolist() == [1.0, 0.0]
    with pytest.raises(ScoreMissing):
        reward_func(["ask: 7"], ["ask: "], ["7"])


@pytest.mark.parametrize(
    ("query", "prompt", "response"),
    [
        ("ab c", "ab", " c"),
        ("<s>ab c</s>", "ab", " c"),
        ("what is it now?\nA: 4", "Q: what is it, what is it now?\nA:", " 4"),  # cut on the left
        ("ab<|im_end|>", "ab", ""),
    ],
)
def test_openrlhf_response_behind_its_prompt(query, prompt, response):
    assert openrlhf._response(query, prompt, openrlhf.END_TOKENS) == response


# The trainers themselves ---------------------------------------------------------------------------------------------


def run_aside(environment: str, script: str, job: dict, folder: Path) -> dict:
    """A script of this folder under a side environment's Python; what it wrote."""
    python = REPOSITORY / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"needs an environment of its own: make {environment}/installed")
    job_file, out_file = folder / "job.json", folder / "out.json"
    job_file.write_text(json.dumps(job))
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [python, Path(__file__).parent / script, job_file, out_file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out_file.read_text())


@pytest.mark.slow
def test_verls_reward_loop_runs_on_plaudit_rewards(tiny_model, recipe, moody, tmp_path):
    answers = ["nothing", "4", "nothing", "7", "nothing", "9"]
    samples = [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + 2?"}],
            "response": answer,
            "data_source": "sums",
            "ground_truth": answer if i % 2 else "1",
            "extra_info": {"index": i},
        }
        for i, answer in enumerate(answers)
    ]
    seven = [answer == "7" for answer in answers]
    job = {
        "model": str(tiny_model),
        "samples": samples,
        "rewards": recipe({"kind": "exact"}, {**moody, "weight": 0.0}),
        "failing": recipe(moody, name="failing"),
        "stated": recipe({**moody, "on_failure": -1.0}, name="stated"),
        "lengths": recipe({"kind": "overlong", "max_tokens": 4, "buffer_tokens": 4, "penalty": 1.0}, name="lengths"),
    }
    out = run_aside(".venv-verl", "side_verl.py", job, tmp_path)
    right = [float(i % 2) for i in range(6)]
    # On the last token of each response, and nowhere else.
    assert [sum(row) for row in out["rm_scores"]] == right
    assert [[x for x in row if x] for row in out["rm_scores"]] == [[x] if x else [] for x in right]
    assert out["extra"]["exact"] == right
    assert [math.isnan(x) for x in out["extra"]["moody"]] == seven  # measured only: no value where it failed, and no harm
    assert out["sync"] == right
    assert out["failing"].startswith("ScoreMissing: reward 'moody' failed (exception: ValueError: I do not like sevens")
    assert out["stated"] == [-1.0 if bad else x for x, bad in zip(right, seven, strict=True)]
    # "nothing" is four tokens or more with its end token; a single digit two, the end token among them: half the penalty.
    assert out["manager"] == [-1.0 if i % 2 == 0 else -0.5 for i in range(6)]


@pytest.mark.slow
def test_trls_grpo_trainer_runs_on_plaudit_rewards(tiny_model, reward_file, tmp_path, recipe, moody):
    # Letters and digits are paid for; a text with an "e" is one the reward fails on.
    picky = tmp_path / "picky.py"
    picky.write_text(
        reward_file.read_text() + "\n\nplain = compute_score\n\n\ndef compute_score(solution_str):\n"
        "    assert 'e' not in solution_str\n    return plain(solution_str)\n"
    )
    rewards = recipe({**moody, "name": "picky", "path": str(picky), "max_failure_rate": 1.0}, {"kind": "exact", "weight": 0.0})
    rows = [{"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"], "data_source": "sums"} for r in prompt_rows(4)]
    out = run_aside(".venv-trl", "side_trl.py", {"model": str(tiny_model), "rewards": rewards, "rows": rows}, tmp_path)
    assert [len(call["rewards"]) for call in out["calls"]] == [8, 8]
    for call in out["calls"]:
        for completion, value in zip(call["completions"], call["rewards"], strict=True):
            text = completion[0]["content"]
            written = sum(c.isascii() and c.isalnum() for c in text)
            assert value == (None if "e" in text else pytest.approx(written / max(1, len(text))))
    values = [value for call in out["calls"] for value in call["rewards"]]
    assert None in values
    assert len({value for value in values if value is not None}) > 2
    for entry, call in zip(out["log"], out["calls"], strict=True):
        told = [value for value in call["rewards"] if value is not None]
        assert entry["reward"] == pytest.approx(sum(told) / len(told), abs=1e-5)  # those without a value are not in the mean
        assert entry["plaudit/failed"] == pytest.approx(1 - len(told) / 8)
        assert math.isfinite(entry["loss"])
