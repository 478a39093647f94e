"""plaudit's rewards in verl, TRL and OpenRLHF. The slow tests run these trainers' own code in separate environments."""

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
from plaudit.adapters.shared_scorer import ScoreMissing, shared_scorer
from plaudit.errors import PlauditError
from support.paths import REPOSITORY
from support.recipes import write_recipe
from support.rows import prompt_rows

# Fails on any text with a "7"; otherwise 1 for the ground truth, and the length of the text.
FLAKY = """
def compute_score(solution_str, ground_truth):
    if "7" in solution_str:
        raise ValueError("no sevens")
    return {"score": float(solution_str.strip() == str(ground_truth)), "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def flaky(tmp_path_factory):
    """Settings of a reward that sometimes fails."""
    path = tmp_path_factory.mktemp("flaky") / "flaky.py"
    path.write_text(FLAKY)
    return {"kind": "function", "name": "flaky", "path": str(path), "workers": 1, "limits": {"timeout_s": 60}}


@pytest.fixture
def recipe(tmp_path):
    def write(*rewards: dict, name: str = "rewards") -> str:
        return str(write_recipe(tmp_path / f"{name}.yaml", {"rewards": list(rewards)}))

    return write


# TRL -----------------------------------------------------------------------------------------------------------------


def test_trl_gets_none_for_a_failed_reward(recipe, flaky):
    function = trl.reward_function(recipe(flaky))
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
    assert logged["plaudit/flaky"] == pytest.approx(1 / 3)  # over the three that have a value
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
def test_trl_ground_truth_columns(recipe, columns):
    prompt = [{"role": "user", "content": "1 + 1"}]
    completion = [{"role": "assistant", "content": "2"}]
    assert trl.reward_function(recipe({"kind": "exact"}))([prompt], [completion], **columns) == [1.0]


def test_trl_repeated_prompts_form_a_group(recipe):
    """Two groups with values (1, 0) and (0, 0, 1), each normalised by its own mean and standard deviation."""
    function = trl.reward_function(recipe({"kind": "exact", "normalise": "group"}))
    values = function(["a", "a", "b", "b", "b"], ["x", "y", "x", "y", "z"], ground_truth=["x", "x", "z", "z", "z"])
    half, third = 1 / 2 / math.sqrt(1 / 2), 1 / 3 / math.sqrt(1 / 3)
    assert values == pytest.approx([half, -half, -third, -third, 2 * third], abs=1e-4)


def test_trl_other_columns_reach_the_reward(recipe):
    rewards = [
        {"kind": "exact", "name": "german", "when": {"lang": "de"}},
        {"kind": "exact", "name": "french", "when": {"lang": "fr"}, "weight": 5.0},
    ]
    values = trl.reward_function(recipe(*rewards))(["a", "b"], ["x", "x"], answer=["x", "x"], lang=["de", "fr"])
    assert values == [1.0, 5.0]


def test_trl_function_can_be_pickled(recipe):
    function = pickle.loads(pickle.dumps(trl.reward_function(recipe({"kind": "exact"}), name="mine")))
    assert (function.__name__, function(["a"], ["x"], answer=["x"])) == ("mine", [1.0])


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain text", "plain text"),
        ([{"role": "assistant", "content": "a message"}], "a message"),
        (
            [{"role": "assistant", "content": ""}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "so 4"}],
            "so 4",
        ),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([], ""),
    ],
)
def test_trl_completion_text(completion, text):
    assert trl.completion_text(completion) == text


# verl ----------------------------------------------------------------------------------------------------------------


def test_verl_function_always_returns_the_same_keys(recipe, flaky):
    rewards = recipe({"kind": "exact", "when": {"data_source": "sums"}}, {**flaky, "weight": 0.5})
    assert verl.compute_score("sums", "2", "2", {"index": 0}, rewards=rewards, reward_router_address="unused") == {
        "score": 1.5,
        "exact": 1.0,
        "flaky": 1.0,
        "malformed": 0.0,
    }
    other = asyncio.run(verl.compute_score_async("other", "2", "3", None, rewards=rewards))
    assert list(other) == ["score", "exact", "flaky", "malformed"]
    assert (other["score"], math.isnan(other["exact"]), other["flaky"]) == (0.0, True, 0.0)


def test_verl_failure_is_raised_instead_of_scored_zero(recipe, flaky):
    rewards = recipe(flaky)
    with pytest.raises(ScoreMissing, match=r"'flaky' failed \(exception: ValueError: no sevens.*on_failure"):
        verl.compute_score("sums", "7", "7", {}, rewards=rewards)
    stated = recipe({**flaky, "on_failure": -1.0}, name="stated")
    assert verl.compute_score("sums", "7", "7", {}, rewards=stated)["score"] == -1.0
    unmatched = recipe({"kind": "exact", "when": {"data_source": "sums"}}, name="unmatched")
    with pytest.raises(ScoreMissing, match="no reward's `when` matches"):
        verl.compute_score("prose", "7", "7", {}, rewards=unmatched)


def test_verl_numpy_values_become_builtin():
    import numpy as np

    row = {"a": np.array(["x", "y"]), "b": np.float32(0.5), "c": [np.int64(3)], "d": {"e": np.array([[1, 2]])}}
    assert verl.to_builtin(row) == {"a": ["x", "y"], "b": 0.5, "c": [3], "d": {"e": [[1, 2]]}}


@pytest.mark.parametrize("start", [lambda r: verl.compute_score("", "2", "2", {}, rewards=r), openrlhf.application])
def test_group_rewards_are_refused_for_single_samples(recipe, start, tmp_path):
    group_function = tmp_path / "longest.py"
    group_function.write_text("def compute_scores(responses): return [float(r == max(responses, key=len)) for r in responses]")
    with pytest.raises(PlauditError, match="'exact': normalise is group, but"):
        start(recipe({"kind": "exact", "normalise": "group"}))
    with pytest.raises(PlauditError, match="'function' compares the responses to a prompt, but"):
        start(recipe({"kind": "function", "path": str(group_function), "scores": "group"}, name="compares"))


@pytest.mark.parametrize(
    "start",
    [
        lambda r: verl.compute_score("", "2", "2", {}, rewards=r),
        lambda r: trl.reward_function(r)(["a"], ["x"], answer=["x"]),
        openrlhf.application,
    ],
)
def test_running_means_are_refused_because_they_depend_on_the_order_of_requests(recipe, start):
    with pytest.raises(PlauditError, match=r"'exact': normalise is running, but .* Set normalise to none\."):
        start(recipe({"kind": "exact", "normalise": "running"}))


def test_bad_row_fails_only_its_own_request_to_a_shared_scorer(recipe):
    shared = shared_scorer(recipe({"kind": "exact"}))
    rows = [{"prompt": "", "response": str(i), "ground_truth": str(i - i % 2)} for i in range(200)]
    rows[50] = {"prompt": "", "response": 7}

    def score(row: dict) -> object:
        try:
            return shared.submit([row]).result()[0]["reward"]
        except PlauditError as error:
            return str(error)

    with ThreadPoolExecutor(16) as pool:
        values = list(pool.map(score, rows))
    assert "should be text" in str(values.pop(50))
    assert values == [float(i % 2 == 0) for i in range(200) if i != 50]


# OpenRLHF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(recipe):
    """Start the server from the command line; returns its address."""
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
            if address := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                return address[1]
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


def test_openrlhf_server_speaks_its_protocol(serve, flaky):
    url = serve(flaky, {"kind": "exact", "weight": 0.5, "when": {"data_source": "sums"}}, options=("--end-token", "<stop>"))
    start = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    labels = ["2", {"ground_truth": "2", "data_source": "sums"}, "3"]
    endings = ["2<|im_end|>\n", "2", "2<stop><|endoftext|>"]
    payload = {"query": [start + end for end in endings], "prompts": [start] * 3, "labels": labels}
    # A plain label has no data_source, so the second reward does not apply.
    assert post(f"{url}/get_reward", payload) == (
        200,
        {
            "rewards": [1.0, 1.5, 0.0],
            "scores": [1.0, 1.5, 0.0],
            "extra_logs": {"flaky": [1.0, 1.0, 0.0], "malformed": [0.0, 0.0, 0.0]},
        },
    )
    status, answer = post(f"{url}/get_reward", {"query": [start + "7"], "prompts": [start], "labels": ["7"]})
    assert status == 500
    assert "no sevens" in answer["error"]
    for wrong in ({}, [], {"query": ["a"], "prompts": [], "labels": []}, {"query": ["a"], "prompts": ["b"], "labels": [""]}):
        assert post(f"{url}/get_reward", wrong)[0] == 400
    with urllib.request.urlopen(f"{url}/health", timeout=60) as health:
        assert json.loads(health.read()) == {"rewards": ["flaky", "exact"]}


@pytest.mark.slow
def test_openrlhf_server_reports_an_invalid_recipe(recipe):
    file = recipe({"kind": "exact", "wieght": 1})
    done = subprocess.run(
        [sys.executable, "-m", "plaudit.adapters.openrlhf", file], capture_output=True, text=True, cwd=REPOSITORY, timeout=280
    )
    assert (done.returncode, "wieght is not a setting" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


def test_openrlhf_local_function_scores_and_raises(recipe, flaky):
    reward_func = openrlhf.reward_function(recipe(flaky))
    answer = reward_func(["ask: 2</s>", "ask: 3"], ["ask: ", "ask: "], ["2", "2"])
    assert (answer["rewards"].tolist(), answer["scores"].tolist()) == ([1.0, 0.0], [1.0, 0.0])
    assert answer["extra_logs"]["flaky"].tolist() == [1.0, 0.0]
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
def test_openrlhf_response_is_split_from_its_prompt(query, prompt, response):
    assert openrlhf._response(query, prompt, openrlhf.END_TOKENS) == response


# The trainers themselves ---------------------------------------------------------------------------------------------


def run_in_environment(environment: str, script: str, job: dict, folder: Path) -> dict:
    """Run a script of this folder with a side environment's Python; returns its output."""
    python = REPOSITORY / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"needs a side environment: make {environment}/installed")
    job_file, out_file = folder / "job.json", folder / "out.json"
    job_file.write_text(json.dumps(job))
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [python, Path(__file__).parent / script, job_file, out_file]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out_file.read_text())


@pytest.mark.slow
def test_verl_reward_loop_uses_plaudit_rewards(tiny_model, recipe, flaky, tmp_path):
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
        "rewards": recipe({"kind": "exact"}, {**flaky, "weight": 0.0}),
        "failing": recipe(flaky, name="failing"),
        "stated": recipe({**flaky, "on_failure": -1.0}, name="stated"),
        "lengths": recipe({"kind": "overlong", "max_tokens": 4, "buffer_tokens": 4, "penalty": 1.0}, name="lengths"),
    }
    out = run_in_environment(".venv-verl", "side_verl.py", job, tmp_path)
    right = [float(i % 2) for i in range(6)]
    # Only on the last token of each response.
    assert [sum(row) for row in out["rm_scores"]] == right
    assert [[x for x in row if x] for row in out["rm_scores"]] == [[x] if x else [] for x in right]
    assert out["extra"]["exact"] == right
    assert [math.isnan(x) for x in out["extra"]["flaky"]] == seven  # weight 0: a failure only leaves NaN
    assert out["sync"] == right
    assert out["failing"].startswith("ScoreMissing: reward 'flaky' failed (exception: ValueError: no sevens")
    assert out["stated"] == [-1.0 if bad else x for x, bad in zip(right, seven, strict=True)]
    # "nothing" is at least four tokens including the end token; a digit is two, for half the penalty.
    assert out["manager"] == [-1.0 if i % 2 == 0 else -0.5 for i in range(6)]


@pytest.mark.slow
def test_trl_grpo_trainer_uses_plaudit_rewards(tiny_model, reward_file, tmp_path, recipe, flaky):
    # Rewards letters and digits; fails on any text with an "e".
    picky = tmp_path / "picky.py"
    picky.write_text(
        reward_file.read_text() + "\n\nplain = compute_score\n\n\ndef compute_score(solution_str):\n"
        "    assert 'e' not in solution_str\n    return plain(solution_str)\n"
    )
    rewards = recipe({**flaky, "name": "picky", "path": str(picky), "max_failure_rate": 1.0}, {"kind": "exact", "weight": 0.0})
    rows = [{"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"], "data_source": "sums"} for r in prompt_rows(4)]
    out = run_in_environment(".venv-trl", "side_trl.py", {"model": str(tiny_model), "rewards": rewards, "rows": rows}, tmp_path)
    assert [len(call["rewards"]) for call in out["calls"]] == [8, 8]
    for call in out["calls"]:
        for completion, value in zip(call["completions"], call["rewards"], strict=True):
            text = completion[0]["content"]
            alphanumeric = sum(c.isascii() and c.isalnum() for c in text)
            assert value == (None if "e" in text else pytest.approx(alphanumeric / max(1, len(text))))
    values = [value for call in out["calls"] for value in call["rewards"]]
    assert None in values
    assert len({value for value in values if value is not None}) > 2
    for entry, call in zip(out["log"], out["calls"], strict=True):
        scored = [value for value in call["rewards"] if value is not None]
        assert entry["reward"] == pytest.approx(sum(scored) / len(scored), abs=1e-5)  # failed samples are not in the mean
        assert entry["plaudit/failed"] == pytest.approx(1 - len(scored) / 8)
        assert math.isfinite(entry["loss"])
