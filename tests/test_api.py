"""The Python API: the documentation's page as it is, recipes from Python, rows and functions as inputs, run folders to read."""

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import plaudit
from plaudit.api import _contents
from plaudit.config import read_draft
from plaudit.data.in_memory import rows_file
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, RecipeError, RunError
from plaudit.input_files import place_inputs
from plaudit.plugins import load_attribute
from plaudit.rewards.functions.callables import code_digest, reward_entries
from support.paths import REPOSITORY
from support.rows import arithmetic_rows
from support.servers import stand_in_judge


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = {"__name__": "__main__"}
    with stand_in_judge() as url:
        page = (REPOSITORY / "docs/python_api.md").read_text("utf-8").replace("http://127.0.0.1:8000", url)
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
            exec(block, notebook)
    run, out = notebook["run"], capsys.readouterr().out
    assert run.metrics.column("step").to_pylist() == [0, 1, 2]
    assert {"parts/right", "parts/digits", "parts/shortest", "parts/length"} <= set(run.metrics.column_names)
    assert len(run.samples(step=1)) == 8
    assert set(run.samples().column("step").to_pylist()) == {1, 2}
    assert (run.model / "config.json").is_file()
    assert sorted(file.name.rpartition("_")[0] for file in (run.folder / "inputs").iterdir()) == [
        "reward_digits", "reward_right", "reward_shortest", "train", "val",
    ]  # fmt: skip
    assert "plaudit.rl(): optim.learning_rate is not a setting. Did you mean optim.lr?" in out
    assert "plaudit.rl(): batch_size is not a setting. Did you mean train.prompts_per_step?" in out
    assert "'reward': 2.0" in out
    assert "[0.9, 0.2]" in out
    assert "exploit: many_guesses" in out

    # The run as it is, resumed with a function whose code has changed.
    exec("def digits(completions): return [0.0 for _ in completions]", notebook)
    settings = [notebook["right"], notebook["digits"], {"function": notebook["shortest"], "weight": 0.1}]
    same = plaudit.rl(run.folder / "recipe.yaml", rewards=[*settings, {"kind": "length", "weight": 0, "at_most": 8}])
    assert same.folder == run.folder
    assert "resumes although" in (err := capsys.readouterr().err)
    assert "although the function of reward 'digits' has changed" in err.replace("\n", " ")

    # Calls that are refused leave the folder as it was.
    before = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    exec("def digits(completions): return [1.0 for _ in completions]", notebook)
    for changed, message in (
        ({"seed": 1}, "belongs to a run with another recipe"),
        ({"model": "models/missing"}, "models/missing"),
    ):
        with pytest.raises(plaudit.PlauditError, match=message):
            plaudit.rl(run.folder / "recipe.yaml", rewards=[notebook["right"], notebook["digits"]], **changed)
        assert {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()} == before


def test_a_file_written_again_within_the_same_second_is_the_new_code(tmp_path, monkeypatch):
    """Bytecode cached by size and time would be the old code: `return 1` and `return 2` are equally long."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "reward.py"
    for value in (1, 2):
        file.write_text(f"def reward(): return {value}")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert load_attribute(f"{file}:reward")() == value
    assert list(tmp_path.iterdir()) == [file]


def test_import_is_light():
    code = "import sys, plaudit; print([m for m in ('torch', 'pydantic', 'pyarrow', 'numpy', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names():
    assert all(getattr(plaudit, name) for name in plaudit.__all__)
    assert set(plaudit.__all__) <= set(dir(plaudit))
    with pytest.raises(AttributeError, match="no attribute 'grpo'"):
        plaudit.grpo  # noqa: B018
    assert (REPOSITORY / "plaudit/py.typed").is_file()


def test_the_function_rl_can_be_called_although_a_package_has_its_name():
    import plaudit.rl.collect

    with pytest.raises(RecipeError, match=r"^plaudit\.rl\(\): "):
        plaudit.rl(rewards=[])


# Recipes -------------------------------------------------------------------------------------------------------------


def test_a_single_reward_needs_no_list():
    with pytest.raises(RecipeError) as one:
        plaudit.rl(rewards=lambda solution_str: 1.0, model="none", data={}, optim={"lrr": 1})
    assert "rewards" not in str(one.value)  # the other settings are wrong
    with pytest.raises(RecipeError, match="rewards should be a list, not 7"):
        plaudit.rl(rewards=7)  # pyright: ignore


def test_sections_are_merged_and_lists_replaced(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("model: {path: m, dtype: float32}\nrewards: [{kind: exact}, {kind: math}]\n")
    draft = read_draft(file, "plaudit.rl()")
    draft.update({"model": {"path": tmp_path / "other"}, "rewards": [{"kind": "regex"}], "optim": {"betas": (0.9, 0.95)}})
    assert draft.tree == {
        "model": {"path": str(tmp_path / "other"), "dtype": "float32"},
        "rewards": [{"kind": "regex"}],
        "optim": {"betas": [0.9, 0.95]},
    }
    assert draft.sources["model", "dtype"] == f"{file}:1"
    assert draft.sources["optim", "betas"] == "plaudit.rl()"
    assert ("rewards", 1) not in draft.sources


def test_a_mistake_in_an_override_names_recipe_and_call(tmp_path, rows_file):
    file = tmp_path / "r.yaml"
    file.write_text(f"model: {{path: m}}\ndata: {{train: {rows_file}}}\nrun: {{dir: {tmp_path}/run}}\n")
    with pytest.raises(RecipeError) as error:
        plaudit.sft(file, optim={"lrr": 1})
    assert str(error.value) == f"{file} (plaudit.sft()): optim.lrr is not a setting. Did you mean optim.lr?"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([{"kind": "exat"}], r"Scorer\(\): rewards\.0\.kind should be one of .* not \"exat\"\. Did you mean exact\?"),
        ([{"kind": "exact", "wieght": 2}], r"Scorer\(\): rewards\.0\.wieght is not a setting\. Did you mean rewards\.0\.weight\?"),
        ([{}], r"Scorer\(\): rewards\.0\.kind is missing"),
        ([], r"Scorer\(\): rewards: is empty"),
        ([lambda text: 1.0], r"reward 'reward': plaudit passes arguments by name .* reward\(text\)\. .*as in verl.*TRL"),
    ],
)
def test_scorer_mistakes_read_like_a_recipes(rewards, message):
    with pytest.raises(RecipeError, match=message):
        plaudit.Scorer(rewards)


# Functions -----------------------------------------------------------------------------------------------------------


def define(text: str, name: str = "f", **values):
    """A function as a notebook defines it."""
    namespace = {"__name__": "__main__", **values}
    exec(text, namespace)
    return namespace[name]


def test_digest_follows_the_code_and_what_it_refers_to():
    text = "def g(x): return x + LIMIT\ndef f(solution_str): return g(len(solution_str))"
    same = code_digest(define(text, LIMIT=1))
    assert code_digest(define(f"# moved\n\n{text}", LIMIT=1)) == same
    assert code_digest(define(text, LIMIT=2)) != same
    assert code_digest(define(text.replace("x + LIMIT", "x - LIMIT"), LIMIT=1)) != same
    assert code_digest(define(text, LIMIT={"b", "a"})) == code_digest(define(text, LIMIT={"a", "b"}))


def test_digest_follows_closures_and_defaults():
    def closing(limit):
        return lambda solution_str: limit

    assert code_digest(closing(1)) == code_digest(closing(1)) != code_digest(closing(2))
    assert code_digest(define("def f(x=1): 0")) != code_digest(define("def f(x=2): 0"))
    assert code_digest(partial(closing(1), 1)) != code_digest(partial(closing(1), 2))


@pytest.mark.parametrize(
    "body",
    [
        "[g(c) for c in solution_str]",
        "sum(g(c) for c in solution_str)",
        "max(solution_str, key=lambda c: g(c))",
        "(lambda: [(lambda: g(c))() for c in solution_str])()",
    ],
)
def test_digest_follows_helpers_of_nested_code(body):
    def digest(helper: str) -> str:
        return code_digest(define(f"def g(c): return {helper}\ndef f(solution_str): return {body}"))

    assert digest("c == 'a'") == digest("c == 'a'") != digest("c == 'b'")


def test_digest_follows_every_one_of_several_objects():
    """What is built to digest one of them is freed, and its address is given to what is built for the next."""

    def digest(*limits):
        return code_digest(define("def f(solution_str): return CHECKS", CHECKS=[partial(max, limit) for limit in limits]))

    assert digest(1, 2, 3) == digest(1, 2, 3)
    assert len({digest(1, 2, 3), digest(1, 2, 4), digest(1, 5, 3)}) == 3


def test_digest_follows_every_kind_of_method():
    for decorator in ("", "@staticmethod", "@classmethod", "@property"):
        text = f"class C:\n    {decorator}\n    def m(*_): return VALUE\ndef f(solution_str): return C"
        digests = [code_digest(define(text.replace("VALUE", value))) for value in "112"]
        assert digests[0] == digests[1] != digests[2], decorator


def test_a_function_of_a_module_file_is_named_by_it(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_file.py").write_text("def short(solution_str): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import my_rewards_file

    [entry] = reward_entries([my_rewards_file.short])
    assert (entry["path"], entry["function"], entry["name"]) == ("my_rewards_file.py", "short", "short")


def test_names_are_distinct_and_settings_kept():
    entries = reward_entries([lambda solution_str: 1, {"function": lambda responses: [1], "weight": 2}, {"kind": "exact"}])
    assert [entry.get("name") for entry in entries] == ["reward", "reward_2", None]
    assert [entry.get("scores") for entry in entries] == ["sample", "group", None]
    assert entries[1]["weight"] == 2


def test_a_function_that_cannot_be_sent_says_why():
    lock = threading.Lock()
    with pytest.raises(RecipeError, match=r"reward 'locked': locked cannot be sent .*lock.*create it inside the function"):
        reward_entries([define("def locked(solution_str): return LOCK", "locked", LOCK=lock)])


def test_an_unchanged_function_is_not_written_again(tmp_path):
    def write(constant: int) -> set[str]:
        _, [file] = place_inputs(reward_entries([define(f"def f(solution_str): return {constant}")]), tmp_path)
        file.write(tmp_path)
        return {file.name for file in tmp_path.iterdir()}

    [first] = write(1)
    (tmp_path / first).write_bytes(b"# mark\n")
    assert write(1) == {first}
    assert (tmp_path / first).read_bytes() == b"# mark\n"
    assert len(write(2)) == 2


def test_rewards_whose_names_differ_in_signs_or_case_only_are_two():
    entries = [
        {"name": name, "function": define(f"def f(solution_str): return {value}")}
        for name, value in (("len>5", 1), ("len<5", 2), ("A", 3), ("a", 4), ("x" * 300, 5))
    ]
    assert len({entry["path"].name.lower() for entry in reward_entries(entries)}) == 5
    with plaudit.Scorer(entries) as scorer:
        [scored] = scorer.score([{"prompt": "p", "response": "r"}])
    assert list(scored["parts"].values()) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_reward_may_have_the_name_of_a_module():
    """Its folder is on sys.path of the worker."""
    text = "def statistics(solution_str):\n    from statistics import mean\n    return mean([1, 2])"
    with plaudit.Scorer([define(text, "statistics")]) as scorer:
        [scored] = scorer.score([{"prompt": "p", "response": "r"}])
    assert (scored["reward"], scored["failure"]) == (1.5, None)


def test_a_refused_call_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(plaudit.PlauditError, match="models/missing"):
        plaudit.sft(model="models/missing", data=arithmetic_rows(2))
    assert list(tmp_path.iterdir()) == []


def test_functions_in_every_signature_run_in_workers():
    text = """
def broken(solution_str):
    raise ValueError("no digits")

def columns(prompts, completions, answer, lang, **rest):
    assert prompts == ["hello"] * 2 and answer == ["x"] * 2 and rest["data_source"] == ["s"] * 2
    return [None if completion == "skip" else FACTOR * len(completion) for completion in completions]

def chat(completions):
    return [len(completion[0]["content"]) for completion in completions]

def needs(completions, missing):
    return [0] * len(completions)
"""
    functions = [define(text, name, FACTOR=0.5) for name in ("broken", "columns", "chat", "needs")]
    row = {"prompt": "hello", "responses": ["four", "skip"], "ground_truth": "x", "data_source": "s", "extra_info": {"lang": "en"}}
    with plaudit.Scorer([functions[0]]) as scorer:
        [failed] = scorer.score([{"prompt": "p", "response": "r"}])
    assert failed["failure"] == {"reward": "broken", "cause": "exception", "message": "ValueError: no digits, at <string>:3"}
    with plaudit.Scorer([functions[1]]) as scorer:
        [scored] = scorer.score([row])
    assert scored["parts"] == [{"columns": 2.0}, {}]
    assert scored["reward"] == [2.0, None]
    assert "returned None" in scored["failure"][1]["message"], "no reward applies to the second response"
    with plaudit.Scorer([functions[1], {"kind": "contains", "text": "o", "weight": 0.5}]) as scorer:
        [scored] = scorer.score([row])
    assert scored["failure"] == [None, None]
    assert scored["reward"] == [2.0 + 0.5, 0.0], "None from a function for TRL: only the other reward counts"
    with plaudit.Scorer([functions[2], {"function": functions[3], "weight": 0}]) as scorer:
        [scored] = scorer.score([{"prompt": [{"role": "user", "content": "hi"}], "response": "four"}])
    assert scored["parts"]["chat"] == 4.0
    assert "it needs missing, and the row has only" in scored["failure"]["message"]


# Rows ----------------------------------------------------------------------------------------------------------------


class FakeDataset:
    """What a Hugging Face data set looks like after `select`."""

    def __init__(self, table: pa.Table):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def with_format(self, kind: str) -> "FakeDataset":
        assert kind == "arrow"
        return self

    def __getitem__(self, rows: slice) -> pa.Table:
        return self.table[rows]


def test_rows_of_every_kind_become_files(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    table = pa.Table.from_pylist(rows)
    for given in (rows, table, FakeDataset(table), iter(rows), table.to_pandas()):
        file = rows_file(given, "train", "data.train")
        file.write(tmp_path)
        assert list(read_rows(tmp_path / file.name)) == rows
    assert rows_file(rows, "train", "").name == rows_file(list(rows), "train", "").name
    assert rows_file(rows[:1], "train", "").name != rows_file(rows, "train", "").name


@pytest.mark.parametrize("changed", ["adapter_model.safetensors", "adapter_config.json", "base/model.safetensors"])
def test_the_automatic_run_name_follows_the_content_of_an_adapter(tmp_path, changed):
    adapter, base = tmp_path / "adapter", tmp_path / "adapter/base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"base")
    (adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    before = _contents({"model": {"path": str(adapter)}})
    assert _contents({"model": {"path": str(adapter)}}) == before
    (adapter / changed).write_text(json.dumps({**config, "r": 16}))
    assert _contents({"model": {"path": str(adapter)}}) != before


def test_the_file_of_a_data_set_is_named_after_its_rows():
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    name = rows_file(rows, "train", "").name
    assert rows_file(rows.map(lambda row: {"prompt": row["prompt"]}), "train", "").name == name  # made differently, the same rows
    for changed in (rows.map(lambda row: {"prompt": row["prompt"] + "?"}), rows.select([1, 0]), rows.select([0])):
        assert rows_file(changed, "train", "").name != name


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "data.train: has no rows"),
        (pa.table({"prompt": []}), "data.train: has no rows"),
        (["a", 1], "data.train: row 1: a row should be a dict with columns, not str"),
        ([{"x": object()}], "data.train: row 1: cannot be saved as JSON: a value of type object"),
        (3, "data.train: should be a list of rows .* not int"),
    ],
)
def test_rows_that_cannot_be_saved(rows, message):
    with pytest.raises(DataError, match=message):
        rows_file(rows, "train", "data.train")


def test_splits_of_a_data_set_get_a_hint():
    rows = arithmetic_rows(2)
    with pytest.raises(RecipeError, match=r"data\.test is not a setting\. Did you mean data\.val\?"):
        plaudit.sft(model="m", data={"train": rows, "test": rows})


# Run folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "run.json").write_text('{"recipe": {"stage": "rl"}, "inputs": {}, "trackers": {}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null, "val/reward": 1.0}\n{"step": 3, ')
    for step in (1, 2):
        pq.write_table(pa.table({"reward": [float(step)], f"part/{step}": [0.0]}), tmp_path / f"samples/train_{step:06d}.parquet")
    return tmp_path


def test_metrics_and_samples_are_tables(run_folder):
    run = plaudit.load_run(run_folder)
    assert run.metrics.column("val/reward").to_pylist() == [None, 1.0]
    assert str(run.metrics.column("loss")[1]) == "nan"
    assert run.samples(step=2).to_pylist() == [{"reward": 2.0, "part/2": 0.0}]
    assert run.samples().column("step").to_pylist() == [1, 2]
    assert repr(run) == f"<run {run_folder}: step 2, loss nan, val/reward 1, not finished>"
    assert run.best is None


def test_what_a_run_does_not_have_is_named(run_folder, tmp_path_factory):
    run = plaudit.load_run(run_folder)
    with pytest.raises(RunError, match="no train samples of step 7; it has train samples of steps 1, 2"):
        run.samples(step=7)
    with pytest.raises(RunError, match="it has no val samples"):
        run.samples(split="val")
    with pytest.raises(RunError, match=r"has not finished.*plaudit rl .*recipe\.yaml"):
        run.model  # noqa: B018
    with pytest.raises(RunError, match=r"is not a run folder: it has no run\.json"):
        plaudit.load_run(tmp_path_factory.mktemp("other"))


def test_inputs_of_a_run_in_training_stay_as_they_are(run_folder):
    import fcntl

    with (run_folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is training in this folder"):
            plaudit.sft(model="m", data=arithmetic_rows(2), run=run_folder)
    assert not (run_folder / "inputs").exists()


@pytest.mark.parametrize("text", ["Why? " * 100, "a/" * 200 + "b", "null \0 byte"])
def test_text_that_cannot_be_a_path_is_reported(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.train: .* does not exist"):
        plaudit.sft(model="m", data=text)
    with pytest.raises(plaudit.PlauditError, match=r"model\.path"):
        plaudit.sft(model=text, data=arithmetic_rows(2))
    with pytest.raises(DataError, match=r'prompts: .* does not exist.*\nTo ask one question, pass a list: \["…"\]'):
        plaudit.sample("m", text)
    with pytest.raises(RunError, match=r"run\.dir: .* cannot be created or written to"):
        plaudit.sft(model="m", data=arithmetic_rows(2), run=text + "x" * 256)
    with pytest.raises(RunError, match="does not exist"):
        plaudit.load_run(text)
    with pytest.raises(RecipeError, match="system"):  # a setting with much text
        plaudit.sft(model="m", data=arithmetic_rows(2), system=text)


def test_a_missing_file_of_prompts_gets_no_hint_if_it_can_only_be_a_path(tmp_path):
    with pytest.raises(DataError) as error:
        plaudit.sample("m", tmp_path / "missing.jsonl")
    assert "pass a list" not in str(error.value)


# Sampling ------------------------------------------------------------------------------------------------------------


def test_sample_checks_its_arguments():
    with pytest.raises(RecipeError, match=r"plaudit\.sample\(\): n should be greater than 0, not 0"):
        plaudit.sample("m", ["q"], n=0)
