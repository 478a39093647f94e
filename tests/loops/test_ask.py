"""`plaudit ask`: one question, a piped one, a chat; rewards; text that is safe for a terminal."""

import io

import pytest

from plaudit.loops.ask import split_thoughts
from plaudit.report.safe_text import safe_text

FEW = ("--max-new-tokens", 3, "--device", "cpu")


@pytest.fixture
def type_lines(monkeypatch):
    """Lines typed at a terminal; then Ctrl-D, or Ctrl-C if `end` says so."""

    def type_lines(*lines: str, end: type[BaseException] = EOFError) -> None:
        typed = iter(lines)

        def read(_prompt: str) -> str:
            line = next(typed, None)
            if line is None:
                raise end
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())

    return type_lines


def test_answers_with_their_rewards(plaudit, tiny_model, tmp_path):
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}, {kind: length, unit: characters, at_most: 100, weight: 0.5}]")
    rewards = ("--rewards", tmp_path / "r.yaml", "--ground-truth", "nothing like it")
    code, out, err = plaudit("ask", tiny_model, "What is 1 + 1?", "-n", 2, *FEW, *rewards)
    assert code == 0, err
    assert out.startswith("[1] ")
    assert "\n[2] " in out
    assert "[2] reward 0.5: exact 0, length 1" in err
    assert plaudit("ask", tiny_model, "What is 1 + 1?", "-n", 2, *FEW)[1] == out  # the same seed
    assert plaudit("ask", tiny_model, "What is 1 + 1?", "-n", 2, *FEW, "--seed", 1)[1] != out


def test_rewards_are_shown_as_they_are(plaudit, tiny_model, tmp_path):
    """Normalised within its group, a single answer would always get 0."""
    (tmp_path / "r.yaml").write_text("rewards: [{kind: length, unit: characters, at_most: 100, normalise: group}]")
    code, _, err = plaudit("ask", tiny_model, "What is 1 + 1?", *FEW, "--rewards", tmp_path / "r.yaml")
    assert code == 0, err
    assert "reward 1: length 1" in err


def test_a_failed_reward_gives_exit_status_1_and_rewards_read_extra_info(plaudit, tiny_model, tmp_path):
    path = tmp_path / "level.py"
    path.write_text("def compute_score(solution_str, extra_info): return extra_info['level']")
    (tmp_path / "r.yaml").write_text(f"rewards: [{{kind: function, path: {path}}}]")
    question = ("ask", tiny_model, "What is 1 + 1?", *FEW, "--rewards", tmp_path / "r.yaml")
    code, out, err = plaudit(*question)
    assert (code, bool(out)) == (1, True)
    assert "reward none: function failed (exception: KeyError: 'level'" in err
    code, _, err = plaudit(*question, "--extra-info", '{"level": 3}')
    assert code == 0, err
    assert "reward 3: function 3" in err
    assert plaudit(*question, "--extra-info", "[3]")[0] == 2


def test_a_piped_question(plaudit, tiny_model, monkeypatch):
    asked = plaudit("ask", tiny_model, "What is 1 + 1?", *FEW, "--temperature", 0)[1]
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 1?\n"))
    assert plaudit("ask", tiny_model, *FEW, "--temperature", 0)[1] == asked
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    code, _, err = plaudit("ask", tiny_model)
    assert (code, err) == (2, "there is no question: write it after the model, or pipe it in\n")


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_chat_remembers_its_turns_and_ends_cleanly(plaudit, tiny_model, type_lines, end, monkeypatch):
    seen = []
    import plaudit.loops.ask as loop

    sample = loop.sample_groups

    def spy(engine, prompts, *arguments, **keywords):
        seen.append([message["role"] for message in prompts[0].prompt.messages])
        return sample(engine, prompts, *arguments, **keywords)

    monkeypatch.setattr(loop, "sample_groups", spy)
    type_lines("hello", "", "and now?", "/new", "again", "/what", end=end)
    code, _, err = plaudit("ask", tiny_model, *FEW, "--system", "Be brief.")
    assert code == 0
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert err.count("/new starts over") == 2  # at the start, and after a command that does not exist


def test_a_chat_that_is_too_long_is_reported_and_continues(plaudit, tiny_model, type_lines):
    type_lines("x" * 500, "hi", "/quit")
    code, out, err = plaudit("ask", tiny_model, *FEW, "--max-prompt-tokens", 60)
    assert code == 0
    assert "more than --max-prompt-tokens 60" in err
    assert out


def test_truth_without_rewards_is_refused(plaudit, tiny_model):
    code, _, err = plaudit("ask", tiny_model, "q", "--ground-truth", "1")
    assert code == 2
    assert "--rewards" in err


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<think>hm</think>4", "hm", "4"),
        ("hm</think>\n\n4", "hm", "4"),  # the template opened the thoughts
        ("<think>never closed", "never closed", ""),
        ("4", "", "4"),
    ],
)
def test_thoughts_are_split_off(text, thoughts, answer):
    assert split_thoughts(text) == (thoughts, answer)


def test_terminal_codes_are_shown_not_obeyed():
    assert safe_text("a\x1b[2J\tb\n\rc\u202ed\x9b") == "a\\x1b[2J\tb\n\\rc\\u202ed\\x9b"
    assert safe_text("Grüße, 你好 👩\u200d🔬") == "Grüße, 你好 👩\u200d🔬"
