"""Shared fixtures: rows, tiny models built from them, and the real data sets where available."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: one thread per process, since tests run in parallel and threads that wait for a core waste it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

gc.disable()  # until the first test: nothing that is imported is garbage (see `fast_gc`)
pytest.register_assert_rewrite("support")
from support.models import KINDS  # noqa: E402
from support.paths import REPOSITORY, TESTS  # noqa: E402
from support.processes import Command  # noqa: E402
from support.rows import arithmetic_rows, pair_rows, prompt_rows, write_jsonl  # noqa: E402


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", arithmetic_rows())


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory, rows_file) -> dict[str, Path]:
    """The model folder of each architecture."""
    from plaudit.prepare.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_tiny_model([rows_file], root / kind, kind=kind, hidden_size=64, layers=2, vocabulary=320)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_model(tiny_models) -> Path:
    return tiny_models["llama"]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets next to the checkout (or $PLAUDIT_DATA); tests that need it skip without it."""
    folder = Path(os.environ.get("PLAUDIT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (or set PLAUDIT_DATA)")
    return folder


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pair_rows())


# The share of ASCII letters and digits in a response: it varies between samples, and a random model can learn to raise it.
DIGITS_AND_LETTERS = """
def compute_score(solution_str):
    written = sum(c.isascii() and c.isalnum() for c in solution_str)
    return {"score": written / max(1, len(solution_str)), "written": written}
"""


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", prompt_rows())


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    """A reward function that a random model can learn to maximise."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(DIGITS_AND_LETTERS)
    return path


@pytest.fixture
def plaudit(monkeypatch, capsys):
    """Runs a plaudit command in this process; returns its exit code, stdout and stderr."""
    from plaudit.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plaudit", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True, scope="module")
def fast_gc() -> None:
    """What is in memory before a file's tests (torch, transformers, all tests) is not searched for garbage again and again: that
    would be a fifth of the time that the tests take."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_interrupts():
    """Restores Ctrl-C handling: processes started in the background ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = [
    TESTS / file
    for file in (
        "cluster/test_ray.py", "reward_models/test_vllm.py", "rollout/native/test_kernels.py", "cluster/test_training.py",
        "cluster/test_failures.py", "test_docs_commands.py", "loops/test_parity_trl.py", "test_pipelines_maths.py",
        "loops/test_rl.py", "rollout/native/test_kernels_compile.py", "viewing/test_browser.py", "models/test_lora_vllm.py",
        "prepare/test_ranking.py", "rollout/test_vllm_lora.py", "loops/test_demo.py", "adapters/test_adapters.py",
        "loops/test_rl_vllm.py", "loops/test_smollm2.py", "rollout/served/test_vllm_servers.py", "test_pipelines.py",
        "loops/test_chain.py", "prepare/test_pointwise.py", "rollout/test_vllm_engine.py",
    )
]  # fmt: skip
"""Files whose slow tests take half a minute or more. They are run first: at the end, one would leave the other worker idle."""


@pytest.hookimpl(tryfirst=True)  # before tests are shuffled, and before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid, a few cases spread over it stay in the core suite, the others are slow tests. These get a longer timeout."""
    grids: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid"):
            grids.setdefault((item.nodeid.partition("[")[0], item.originalname), []).append(item)
    for cases in grids.values():
        mark = cases[0].get_closest_marker("grid")
        assert mark is not None
        [core] = mark.args
        stay = {i * len(cases) // core for i in range(core)}
        for i, item in enumerate(cases):
            if i not in stay:
                item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
    place = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)) if item.get_closest_marker("slow") else len(place))


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    Command.kill_all()


@pytest.fixture(autouse=True, scope="session")
def no_curves() -> Iterator[None]:
    """A picture of twenty panels takes longer than the runs of most tests. Tests of pictures put the real function back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plaudit.report.curves.draw_curves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def relative_prompts(tmp_path_factory) -> Iterator[Path]:
    """A relative path: it is part of a prompt's id, which seeds sampling, and samples should be the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("prompts"))
        yield write_jsonl(Path("prompts.jsonl"), prompt_rows())
