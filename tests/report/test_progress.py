"""What a terminal or a log shows of a run: lines that fit, estimates that hold, and nothing that a terminal would act on."""

import pytest
from rich.cells import cell_len

from plaudit.errors import StopRequested
from plaudit.report import progress
from plaudit.report.activity import Activity
from plaudit.report.fitting import Part, cut, duration, fit, printable
from plaudit.report.progress import StepProgress, TimeLeft, follow, print_line, print_own_warning, set_quiet
from plaudit.report.samples import ShownSample, best_and_worst, samples_to_follow
from plaudit.types import Score, ScoredGroup
from support.rewards import BROKEN, group


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[80, 100])
def width(request, monkeypatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setattr(progress.console, "_width", request.param)  # it may have been made when COLUMNS was set
    return request.param


# Lines ---------------------------------------------------------------------------------------------------------------


def test_the_least_important_parts_are_left_out():
    parts = [Part("rl 3/9", 0), Part("reward 0.5", 0), Part("entropy 1.5", 2), Part("0:01:00 left", 1)]
    assert fit(parts, 80) == "rl 3/9  reward 0.5  entropy 1.5  0:01:00 left"
    assert fit(parts, 40) == "rl 3/9  reward 0.5  0:01:00 left"
    assert fit(parts, 20) == "rl 3/9  reward 0.5"
    assert fit(parts, 5) == "rl 3/9  reward 0.5", "what the line is for stays"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n\nlines\tand  spaces ", "two lines and spaces"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\u202eabc\u200b", r"\x9b31m\u202eabc\u200b"),
        ("\ud800 é 漢", r"\ud800 é 漢"),
        (":smile: [bold]x[/bold]", ":smile: [bold]x[/bold]"),
    ],
    ids=["white space", "escape sequences", "direction and invisible characters", "unpaired surrogates", "markup"],
)
def test_a_terminal_acts_on_nothing_that_a_model_writes(capsys, text, shown):
    assert printable(text) == shown
    print_line(printable(text))
    assert capsys.readouterr().err == f"{shown}\n"


@pytest.mark.parametrize(
    "text", ["short", "abc " * 100, "漢字" * 100, "é\u0301" * 1000], ids=["short", "ASCII", "wide", "combining"]
)
def test_a_text_is_cut_to_its_columns(text):
    for columns in (10, 11, 40):
        shown = cut(text, columns)
        assert cell_len(shown) <= columns
        assert len(shown) <= 5 * columns
        assert shown == text or (shown[0] == text[0] and shown[-1] == text[-1])


# Samples -------------------------------------------------------------------------------------------------------------


def scored(id: str, **samples: float | None) -> ScoredGroup:
    scores = tuple(BROKEN if value is None else Score(value) for value in samples.values())
    return ScoredGroup(group(*samples, id=id), scores, {})


def test_the_best_and_the_worst_sample_are_shown():
    groups = [scored("p", a=None, b=0.5), scored("q", c=-1.0, d=2.0), scored("r", e=2.0, f=-1.0)]
    assert [(shown.which, shown.reward, shown.response) for shown in best_and_worst(groups)] == [
        ("best", 2.0, "d"), ("worst", -1.0, "c"),
    ]  # fmt: skip
    assert [(shown.which, shown.response) for shown in samples_to_follow(groups, 3)[2:]] == [("2", "c"), ("3", "e")]
    assert [shown.which for shown in best_and_worst([scored("p", a=1.0, b=1.0)])] == ["best"]
    assert best_and_worst([scored("p", a=None)]) == []


def test_a_sample_is_folded_to_the_windows_width(width):
    long = ShownSample("worst", -12.5, "Why? " * 100, "Because.\n" * 100 + "\x1b[31m42", {"rule": -12.0, "tone": -0.5})
    lines = long.lines(width)
    assert len(lines) == 7  # scores, three lines of the prompt, three of the response
    assert max(map(cell_len, lines)) <= width
    assert lines[0].startswith("worst -12.5000  rule -12")
    assert lines[1].startswith("  › Why? Why? ")
    assert lines[-1].endswith(r"\x1b[31m42")
    assert ShownSample("best", 1.0, "2 + 2?", "").lines(width) == ["best  1.0000", "  › 2 + 2?", "  (empty)"]


# Time left -----------------------------------------------------------------------------------------------------------


def test_neither_validations_nor_the_first_step_count_as_steps(clock):
    left = TimeLeft(10, 0, None, clock)
    clock.now += 300
    left.update(0, 300.0)
    assert left.seconds() is None
    clock.now += 60
    left.update(1, 0.0)
    assert left.seconds() == 9 * 60 + 300, "there is no other step yet; a last validation is to come"
    for step in (2, 3):
        clock.now += 10
        left.update(step, 0.0)
    assert left.seconds() == 7 * 10 + 300
    clock.now += 110
    left.update(4, 100.0)
    assert left.seconds() == 6 * 10 + 100


@pytest.mark.parametrize(("every", "validations"), [(None, 1), (3, 3), (5, 1), (10, 1)])
def test_validations_to_come_are_counted(clock, every, validations):
    left = TimeLeft(10, 4, every, clock)
    left.update(4, 7.0)
    clock.now += 1
    left.update(5, 0.0)
    assert left.seconds() == 5 * 1 + validations * 7.0


def test_steps_that_are_counted_in_chunks(clock):
    left = TimeLeft(1000, 0, None, clock)
    for done in (256, 512):
        clock.now += 25.6
        left.update(done, 0.0)
    assert left.seconds() == pytest.approx(48.8)


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.6, 3600 * 25 + 61)] == ["0:00:00", "0:01:00", "25:01:01"]


# Steps ---------------------------------------------------------------------------------------------------------------

RL = {
    "reward": 0.51234, "length": 1234.5, "entropy": 10.123, "dropped": 1200.0,
    "time/tokens_per_s": 123456.7, "time/validate_s": 9.0,
}  # fmt: skip


def test_lines_of_steps_fit(width, clock, capsys):
    with StepProgress("reward-model", 10_000, 0, clock=clock) as steps:
        for step in (1, 9999, 10_000):
            clock.now += 100_000
            steps.update(step, RL | ({"val/reward": -1.25} if step == 10_000 else {}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("reward-model 1/10000  reward 0.5123  ")
    assert lines[0].endswith(" left")
    assert ("length 1,234" in lines[0]) == (width == 100)
    assert lines[2].startswith("reward-model 10000/10000  reward 0.5123  val/reward -1.2500")


def test_a_bar_fits(width, clock, monkeypatch, capsys):
    monkeypatch.setattr(progress.console, "_force_terminal", True)
    activity = Activity(clock=clock)
    with StepProgress("rl", 1000, 0, activity=activity, clock=clock) as steps:
        clock.now += 1000
        steps.update(1, RL)
        with activity.phase("validation", prompts=10_000, samples=80_000) as phase:
            phase.engine_step(10)
            clock.now += 1000
            phase.update(2000, 1000, 123_456)
            rendered = [progress.console.render_lines(line, pad=False) for line in steps.bar.get_renderables()]
    capsys.readouterr()
    lines = ["".join(segment.text for segment in line).rstrip() for lines in rendered for line in lines]
    assert len(lines) == 2, "nothing wraps"
    assert lines[0].startswith("rl ")
    assert " left" in lines[0]
    assert "…" not in "".join(lines)
    assert lines[1].startswith("validation: 2,000/10,000 prompts sampled  1,000 scored  ")


def test_quiet_is_silent(clock, capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(progress.console, "_force_terminal", terminal)
        set_quiet(True)
        try:
            activity = Activity(clock=clock)
            with (
                StepProgress("rl", 2, 0, activity=activity, clock=clock) as steps,
                activity.phase("x", prompts=1, samples=1) as phase,
            ):
                clock.now += 1000
                phase.update(1, 1, 0)
                steps.update(1, RL | {"val/reward": 1.0})
                print_line("a warning", "yellow")
                assert list(progress.show_progress(range(3), "reading")) == [0, 1, 2]
        finally:
            set_quiet(False)
        assert capsys.readouterr() == ("", "")


@pytest.fixture
def following(monkeypatch):
    monkeypatch.setattr(progress, "_FOLLOWING", [])
    yield
    set_quiet(False)


@pytest.mark.parametrize(("quiet", "shown"), [(False, "rank 1: scores_1.sqlite is damaged\n"), (True, "")])
def test_a_process_that_does_not_lead_prints_its_own_warnings_only(following, capsys, quiet, shown):
    set_quiet(quiet)
    follow("rank 1: ")
    print_line("noticed by every process", "yellow")
    print_own_warning("scores_1.sqlite is damaged")
    assert capsys.readouterr().err == shown


# Within a step -------------------------------------------------------------------------------------------------------


def test_a_log_shows_what_goes_on_now_and_then(clock, capsys):
    activity = Activity(clock=clock)
    with StepProgress("rl", 2, 0, activity=activity, clock=clock), activity.phase("step 1", prompts=4, samples=8) as phase:
        for _ in range(9):
            clock.now += 1
            phase.engine_step(50)
        assert capsys.readouterr().err == ""
        phase.sample_done(group("a").samples[0])
        clock.now += 1
        phase.engine_step(50)
        assert capsys.readouterr().err == "step 1: 0/4 prompts sampled  0 scored  50 tok/s  0:01:10 left\n"
        clock.now += 19
        phase.update(2, 0, 6)
        assert capsys.readouterr().err == ""
        clock.now += 1
        phase.update(4, 1, 7)
        assert capsys.readouterr().err == "step 1: 4/4 prompts sampled  1 scored  7 judge calls  0:03:30 left\n"
    assert activity.line(80) == ""


def test_batches_of_rows_are_counted(clock, capsys):
    activity = Activity(clock=clock)
    with StepProgress("sft", 2, 0, activity=activity, clock=clock):
        batches = activity.batches([[0, 3], [1], [2, 4, 5]], label="validation", unit="rows")
        assert next(batches) == [0, 3]
        assert activity.line(80) == "validation: 0/6 rows"
        clock.now += 5
        assert next(batches) == [1]
        assert activity.line(80) == "validation: 2/6 rows  0:00:10 left"
        clock.now += 5
        assert list(batches) == [[2, 4, 5]]
        assert capsys.readouterr().err == "validation: 3/6 rows  0:00:10 left\n", "after ten seconds"
    assert activity.line(80) == ""


def test_a_stop_leaves_the_phase():
    stop = []

    def check() -> None:
        if stop:
            raise StopRequested

    activity = Activity(check)
    with activity.phase("step 1", prompts=1, samples=1) as phase:
        phase.engine_step(1)
        stop.append(True)
        with pytest.raises(StopRequested):
            phase.engine_step(1)
    assert activity.line(80) == ""
    with pytest.raises(StopRequested), activity.phase("validation", prompts=1, samples=1):
        pytest.fail("it does not begin")


@pytest.mark.parametrize(("terminal", "written"), [(True, "\r\x1b[2K\x1b[?25h"), (False, "")])
def test_the_terminal_of_a_killed_process_is_restored(terminal, written, monkeypatch, capsys):
    """Its bar is gone, and the cursor that it had hidden is back."""
    monkeypatch.setattr(progress.console, "_force_terminal", terminal)
    monkeypatch.setattr(progress.console, "legacy_windows", False)
    progress.restore_terminal()
    assert capsys.readouterr().err == written
