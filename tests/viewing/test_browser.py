"""`plaudit view` in a real browser: Debian's chromium, driven by playwright. Nothing may be loaded from elsewhere."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plaudit.rewards.client import GIVEN_UP
from support.made_runs import make_run, scored_group
from support.pages import HOSTILE, chromium, least_contrast, watched_page

pytestmark = pytest.mark.slow
TEXT = HOSTILE + "\x1b[2J\u202eright to left\u202c"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Six steps: two components, a failure, a judge, hostile text and a response of a megabyte."""
    trace = {"prompt": "Is it polite? <b>bold</b>", "answer": "7 of 10"}
    parts = [{"exact": 1.0, "tone": 0.2}, {"exact": 0.0, "tone": 0.8}, {"exact": 0.0, "tone": 0.1}, {"exact": 1.0, "tone": 0.9}]
    thought = "<think>\nOne and one.\n</think>\nTwo."
    steps = {}
    for step in range(1, 7):
        first = scored_group(
            "p1", [thought, "the answer is 3", TEXT, f"two, at step {step}"], [1.1, 0.4, 0.05, 1.45], parts=parts, trace=trace
        )
        failed = scored_group("p2", ["x", "y"], [None, 0.25], prompt="Say x.", data_source="letters")
        long = scored_group("p3", ["z" * 1_000_000, "short"], [0.0, 1.0], prompt="Be brief. " * 20, tokens=[4, 2])
        steps[step] = [first, failed, long]
    folder = make_run(tmp_path_factory.mktemp("runs") / "made", steps, recipe={"run.max_steps": 6})
    return make_run(folder, {}, recipe={"run.max_steps": 6})


@pytest.fixture(scope="module")
def address(run, tmp_path_factory) -> Iterator[str]:
    other = make_run(
        tmp_path_factory.mktemp("other") / "other", {1: [scored_group("p1", ["2", "3"], [1.0, 0.0])]}, recipe={"optim.lr": 3e-6}
    )
    with serving(run, other) as url:
        yield url


class serving:
    """`plaudit view` of these runs; its address."""

    def __init__(self, *runs: Path):
        command = [sys.executable, "-m", "plaudit", "view", *map(str, runs), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        return found[0]

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def page(browser, request) -> Iterator:
    """Fails the test if the page has logged an error or requested anything from another machine."""
    with watched_page(browser, **getattr(request, "param", {})) as page:
        yield page
        page.expected.append("ERR_CONNECTION_REFUSED")  # a page follows its run for as long as it is open, the server or not


def wait_for_title(page, name: str) -> None:
    page.get_by_role("heading", level=1, name=name).wait_for()


def text_of(page, selector: str = "main") -> str:
    return page.locator(selector).inner_text()


def test_every_page_is_linked_from_the_first(page, address):
    page.goto(address)
    wait_for_title(page, "2 runs")
    assert "optim.lr" in text_of(page)  # how their recipes differ
    page.get_by_role("link", name="last step").first.click()
    wait_for_title(page, "Step 6")
    assert "timeout" in text_of(page)
    assert "plaudit audit" in text_of(page)
    page.locator("a.cell").first.click()
    wait_for_title(page, "Sample")
    page.get_by_role("link", name="Diagnostics").click()
    wait_for_title(page, "Diagnostics")
    page.get_by_role("heading", name="judge against rule: tone and exact").wait_for()
    page.get_by_role("link", name="Search").click()
    wait_for_title(page, "Search")


@pytest.mark.parametrize("mistyped", ["%zz", "constructor", "step/made/train/x"])
def test_an_address_that_leads_nowhere_says_so(page, address, mistyped):
    page.expected = ["400"]
    page.goto(f"{address}/#/{mistyped}")
    page.locator(".notice.error").wait_for()


def test_a_sample_shows_what_was_scored_and_how_the_reward_came_about(page, address):
    page.goto(f"{address}/#/sample/made/train/3/0")
    wait_for_title(page, "Sample 1 of 4")
    text = text_of(page)
    assert "scored: <think>" in text
    assert "7 of 10" in text
    assert "0.5 × 0.2" in text
    assert page.locator("details.thoughts").get_attribute("open") is None  # folded
    page.locator("details.thoughts summary").click()
    assert "One and one." in text_of(page, "details.thoughts")
    page.get_by_role("button", name="look for it").click()
    page.get_by_role("link", name="step 6", exact=True).wait_for()


def test_hostile_text_is_shown_as_text(page, address):
    page.goto(f"{address}/#/sample/made/train/1/2")
    wait_for_title(page, "Sample 3 of 4")
    assert "<script>window.hacked = 1</script>" in text_of(page, ".response")
    assert "⟨U+001B⟩[2J⟨U+202E⟩right to left" in text_of(page, ".response")
    for route in ("#/step/made/train/1", "#/search/made?text=script"):
        page.goto(f"{address}/{route}")
        wait_for_title(page, "")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0


def test_a_response_of_a_megabyte_is_shown_in_parts(page, address):
    page.goto(f"{address}/#/sample/made/train/1/6")
    wait_for_title(page, "Sample 1 of 2")
    more = page.get_by_role("button", name=re.compile("show more")).first
    assert "1,000,000 characters" in more.inner_text()
    before = len(text_of(page, ".response"))
    more.click()
    assert len(text_of(page, ".response")) > before + 100_000


def test_keys(page, address):
    page.goto(f"{address}/#/step/made/train/2")
    wait_for_title(page, "Step 2")
    page.keyboard.press("ArrowRight")
    wait_for_title(page, "Step 3")
    page.goto(f"{address}/#/sample/made/train/3/0")
    wait_for_title(page, "Sample 1 of 4")
    page.keyboard.press("j")
    wait_for_title(page, "Sample 2 of 4")
    page.keyboard.press("k")
    wait_for_title(page, "Sample 1 of 4")
    page.keyboard.press("J")
    wait_for_title(page, "Sample 1 of 2")
    page.keyboard.press("u")
    wait_for_title(page, "Step 3")
    page.keyboard.press("/")
    wait_for_title(page, "Search")
    page.keyboard.type("answer is")
    page.keyboard.press("Enter")
    page.locator("a.hit mark").first.wait_for()
    assert page.locator("a.hit").count() == 6


def test_the_back_button_leads_to_where_it_was(page, address):
    page.goto(f"{address}/#/search/made?least=0")
    page.locator("a.hit").nth(40).wait_for()
    page.keyboard.press("Escape")
    page.evaluate("addEventListener('scrollend', () => { window.scrolled = true }); scrollTo(0, 1500)")
    page.wait_for_function("window.scrolled")
    page.locator("a.hit").nth(30).evaluate("(hit) => hit.click()")  # without scrolling to it
    wait_for_title(page, "Sample")
    assert page.evaluate("scrollY") == 0
    page.go_back()
    wait_for_title(page, "Search")
    assert page.evaluate("scrollY") == 1500
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.go_forward()
    wait_for_title(page, "Sample")


def test_search_and_its_filters(page, address):
    page.goto(f"{address}/#/search/made?failure=timeout&step=2")
    page.locator("a.hit").first.wait_for()
    assert page.locator("a.hit").count() == 1
    causes = page.get_by_label("show").locator("option").evaluate_all("(all) => all.map((one) => one.value)")
    assert {"timeout", "unparsable", GIVEN_UP} <= set(causes)
    page.goto(f"{address}/#/search/made?text=step+[34]&is_regex=true")
    page.locator("a.hit").nth(1).wait_for()
    assert page.locator("a.hit").count() == 2
    page.expected = ["400"]
    page.goto(f"{address}/#/search/made?text=(&is_regex=true")
    page.get_by_text("the regular expression cannot be read").wait_for()


def test_a_search_with_many_hits_says_how_many_and_shows_more(page, tmp_path):
    group = scored_group("p1", ["yes"] * 450, [1.0] * 450)
    run = make_run(tmp_path / "many", {1: [group], 2: [group]})
    subprocess.run([sys.executable, "-m", "plaudit", "view", run, "--out", tmp_path / "a.html"], check=True, capture_output=True)
    with serving(run) as address:
        page.goto(f"{address}/#/search/many?text=yes")
        page.get_by_text("The first 200 of 450 samples in 1 step, newest first; 1 older step is not searched yet.").wait_for()
        page.get_by_role("button", name="show 200 more").click()
        page.get_by_text("The first 400 of 450 samples").wait_for()
        page.get_by_role("button", name="show 50 more").click()
        page.get_by_text("The first 600 of 900 samples in 2 steps, newest first.").wait_for()  # 50, and 150 of the older step
        assert page.locator("a.hit").count() == 600
        page.goto(f"file://{tmp_path / 'a.html'}#/search/many?text=yes")
        page.get_by_text("The first 200 of 900 samples in 2 steps").wait_for()
        for shown in (400, 600, 800):
            page.get_by_role("button", name=re.compile(r"show \d+ more")).click()
            page.get_by_text(f"The first {shown} of 900 samples in 2 steps").wait_for()
        page.get_by_role("button", name="show 100 more").click()
        page.get_by_text("900 samples in 2 steps, newest first.", exact=True).wait_for()
        assert page.locator("a.hit").count() == 900


def test_a_sample_of_a_very_large_step_has_its_own_group(page, tmp_path):
    groups = [scored_group(f"p{i}", ["x"] * 100, [i / 100.0] * 100, prompt=f"Prompt {i}") for i in range(100)]
    with serving(make_run(tmp_path / "large", {1: groups})) as address:
        page.goto(f"{address}/#/sample/large/train/1/8950")
        wait_for_title(page, "Sample 51 of 100")
        assert "group 90 of 100" in text_of(page)
        assert "Its group: mean 0.89," in text_of(page)
        assert page.locator(".mates a").count() == 100
        page.keyboard.press("J")
        wait_for_title(page, "Sample 1 of 100")
        page.get_by_text("group 91 of 100").wait_for()
        page.keyboard.press("u")
        page.get_by_text("Below are samples 8,101–10,000 of 10,000.").wait_for()
        assert page.locator(".group:not(.head)").count() == 19
        page.get_by_role("link", name="1–8,100").click()
        page.get_by_text("Below are samples 1–8,100 of 10,000.").wait_for()
        assert "0.495" in text_of(page, ".tiles")  # the mean of all


def test_an_advantage_is_called_a_mean_where_it_is_one(page, tmp_path):
    made = scored_group("p1", ["2", "3"], [1.0, 0.0])
    run = make_run(tmp_path / "made", {1: [made]})
    table = pq.read_table(run / "samples/train_000001.parquet")
    advantages = pa.array([0.5, -0.5], pa.float64())
    pq.write_table(
        table.set_column(table.column_names.index("advantage"), "advantage", advantages), run / "samples/train_000001.parquet"
    )
    rows = [{"step": 1, "prompt": "Hi", "completion": text, "tone": 1.0, "advantage": 0.25} for text in "ab"]
    (tmp_path / "trl").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "trl/completions_00001.parquet")
    with serving(run, tmp_path / "trl") as address:
        page.goto(f"{address}/#/sample/made/train/1/0")
        page.get_by_text("advantage, mean over its tokens +0.5").wait_for()
        page.goto(f"{address}/#/sample/trl/train/1/0")
        page.get_by_text("advantage +0.25").wait_for()


def test_a_dump_shows_what_is_unknown_as_unknown(page, tmp_path):
    rows = [
        {"step": 1, "prompt": "Hi", "completion": text, "brevity": 1.0, "tone": 0.5, "advantage": advantage}
        for text, advantage in (("a", 0.5), ("b", -0.5))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    with serving(tmp_path) as address:
        page.goto(address)
        wait_for_title(page, "")
        assert "null" not in text_of(page)
        page.get_by_role("link", name="last step").click()
        wait_for_title(page, "Step 1")
        for name in ("mean reward", "malformed", "a reward failed", "truncated"):
            assert f"{name}: not recorded" in text_of(page, ".tiles")
        assert "0 %" not in text_of(page, ".tiles")
        assert "its colour is its advantage" in text_of(page)
        assert page.locator(".cell.failed").count() == 0
        assert page.get_by_label("filter").locator("option").all_inner_texts() == ["all groups"]
        page.get_by_role("link", name="Search").click()
        page.get_by_label("show").select_option("malformed")
        page.expected = ["400"]
        page.get_by_role("button", name="Search").click()
        page.get_by_text("does not say which samples are malformed").wait_for()


def test_the_table_of_runs_shows_what_their_stages_have(page, tmp_path):
    empty = make_run(tmp_path / "empty", {})
    (empty / "metrics.jsonl").unlink()
    with serving(empty) as address:
        page.goto(address)
        wait_for_title(page, "empty")
        assert "val/reward" in text_of(page, "table.runs")
        assert "loss" not in text_of(page, "table.runs")


def test_an_rl_run_next_to_an_sft_run(page, tmp_path):
    """What only one stage has is folded; what both have and set differently comes first."""
    rl = make_run(tmp_path / "rl", {1: [scored_group("p1", ["2", "3"], [1.0, 0.0])]})
    sft = make_run(tmp_path / "sft", {})
    recipe = {"stage": "sft", "model.path": "models/small", "run.dir": "runs/sft", "optim.lr": 2e-3, "data.packing": True}
    (sft / "run.json").write_text(json.dumps(json.loads((sft / "run.json").read_text()) | {"recipe": recipe}))
    (sft / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with serving(rl, sft) as address:
        page.goto(address)
        wait_for_title(page, "2 runs")
        line = "how their recipes differ in what rl and sft have in common (2 settings: stage, optim.lr)"
        both = page.locator("details", has_text=line)
        assert both.locator("tbody td:first-child").all_inner_texts() == ["stage", "optim.lr"]
        only = page.locator("details", has_text="settings that only rl has (9: run, rewards)")
        assert only.get_attribute("open") is None
        assert page.locator("details", has_text="settings that only sft has (1: data)").count() == 1


def test_groups_can_be_sorted_and_filtered(page, address):
    page.goto(f"{address}/#/step/made/train/1")
    wait_for_title(page, "Step 1")
    page.get_by_label("order").select_option("failures")
    assert "Say x." in text_of(page, ".group:not(.head) >> nth=0")
    page.get_by_label("filter").select_option("with failures")
    assert page.locator(".group:not(.head)").count() == 1


def test_a_point_of_a_curve_leads_to_its_samples(page, address):
    page.goto(f"{address}/#/diagnostics/made")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="components and the total")).locator("svg")
    chart.wait_for()
    box = chart.bounding_box()
    chart.click(position={"x": box["width"] - 12, "y": box["height"] / 2})
    wait_for_title(page, "Step 6")


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True, ids=["dark", "light"])
def test_text_can_be_read_in_dark_and_light(page, address):
    page.goto(f"{address}/#/step/made/train/1")
    wait_for_title(page, "Step 1")
    assert least_contrast(page, "body", ".dim", "a.prompt") >= 4.5  # WCAG AA


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(page, address, width):
    page.set_viewport_size({"width": width, "height": 844})
    for route in (
        "",
        "#/step/made/train/1",
        "#/sample/made/train/1/0",
        "#/sample/made/train/1/6",
        "#/diagnostics/made",
        "#/search/made?text=the",
    ):
        page.goto("about:blank")  # or the page before it would still be there
        page.goto(f"{address}/{route}")
        wait_for_title(page, "")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, route
        wider = page.evaluate("[...document.querySelectorAll('.scroll:has(table.runs)')].map((e) => e.scrollWidth - e.clientWidth)")
        assert wider == ([0] if route == "" else []), route


def test_a_run_that_trains_is_followed(page, tmp_path):
    group = [scored_group("p1", ["2", "3"], [1.0, 0.0])]
    run = make_run(tmp_path / "live", {1: group})
    with (run / ".lock").open("a") as lock, serving(run) as address:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page.goto(address)
        page.get_by_text("training, step 1").wait_for()
        make_run(run, {2: group, 3: group})
        page.get_by_text("training, step 3").wait_for()
        page.get_by_role("link", name="last step").click()
        wait_for_title(page, "Step 3")


def test_a_training_run_is_followed_to_its_end(page, tmp_path):
    """A real one: held after its first steps until the page is open, so that it cannot be over before."""
    with first_rl(tmp_path, max_steps=12) as training, serving(tmp_path / "rl") as address:
        page.goto(address)
        page.get_by_text(re.compile(r"training, step \d+ of 12")).wait_for()
        page.evaluate("window.never_reloaded = true")
        page.get_by_role("link", name="last step").click()
        page.get_by_role("heading", level=1, name=re.compile(r"Step \d+")).wait_for()
        opened = int(re.findall(r"Step (\d+)", text_of(page, "h1"))[0])
        assert opened < 12
        assert page.get_by_role("button", name="→").is_disabled()  # nothing comes after it yet
        training.send_signal(signal.SIGCONT)
        page.get_by_role("button", name="→").and_(page.locator(":enabled")).click()
        wait_for_title(page, f"Step {opened + 1}")
        page.get_by_role("link", name="Runs").click()
        page.locator(".pill.finished").wait_for(timeout=120_000)
        assert "the model is in" in text_of(page)
        assert page.locator(".pill.training").count() == 0
        page.get_by_role("link", name="last step").click()
        wait_for_title(page, "Step 12")
        assert page.evaluate("window.never_reloaded")
        assert training.wait() == 0


class first_rl:
    """recipes/first/rl.yaml, started; entered when it has written its first step, and held there."""

    def __init__(self, folder: Path, max_steps: int):
        plaudit = [sys.executable, "-m", "plaudit"]
        rows, self.run = "recipes/first/train.jsonl", folder / "rl"
        subprocess.run([*plaudit, "prepare", "tiny-model", rows, "--out", str(folder / "tiny")], check=True, capture_output=True)
        settings = [f"model.path={folder / 'tiny'}", f"run.dir={self.run}", f"run.max_steps={max_steps}"]
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen([*plaudit, "rl", "recipes/first/rl.yaml", *settings], stdout=self.log, stderr=self.log)

    def __enter__(self) -> subprocess.Popen:
        while not list(self.run.glob("samples/train_*.parquet")):
            assert self.process.poll() is None, Path(self.log.name).read_text()
            time.sleep(0.05)
        self.process.send_signal(signal.SIGSTOP)
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait()
        self.log.close()


def test_a_run_that_is_deleted_meanwhile_says_so(page, tmp_path):
    group = scored_group("p1", ["2", "3"], [1.0, 0.0])
    run = make_run(tmp_path / "gone", {1: [group], 2: [group, scored_group("p2", ["2", "3"], [1.0, 1.0])]})
    with serving(run) as address:
        page.goto(address)
        wait_for_title(page, "gone")
        shutil.rmtree(run)
        page.get_by_text("it was moved or deleted").wait_for()
        assert page.locator(".chart").count() == 1  # what is shown stays
        page.keyboard.press("d")
        wait_for_title(page, "Diagnostics")
        page.get_by_text("it was moved or deleted").wait_for()


def test_the_file_shows_the_same_without_a_server(page, run, tmp_path):
    command = [sys.executable, "-m", "plaudit", "view", str(run), "--out", str(tmp_path / "a.html")]
    subprocess.run(command, check=True, capture_output=True)
    page.goto(f"file://{tmp_path / 'a.html'}#/sample/made/train/1/2")
    wait_for_title(page, "Sample 3 of 4")
    assert "<script>window.hacked = 1</script>" in text_of(page, ".response")
    page.goto(f"file://{tmp_path / 'a.html'}#/search/made?text=answer+is")
    page.locator("a.hit").nth(5).wait_for()
    page.goto(f"file://{tmp_path / 'a.html'}#/diagnostics/made")
    page.get_by_role("heading", name="Reward and its components").wait_for()
    assert page.evaluate("window.hacked") is None


def test_a_server_with_a_token_asks_for_it(page, run, monkeypatch):
    monkeypatch.setenv("VIEW_TOKEN", "opensesame")
    page.expected = ["401"]
    command = [sys.executable, "-m", "plaudit", "view", str(run), "--port", "0", "--token-env", "VIEW_TOKEN"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page.goto(re.search(r"http://\S+", process.stdout.readline())[0])
        page.get_by_label("token").fill("opensesame")
        page.get_by_role("button", name="Continue").click()
        wait_for_title(page, "made")
        process.terminate()


def test_the_page_has_what_the_run_has(page, address, run):
    """The numbers on the page are those of the file."""
    page.goto(f"{address}/#/step/made/train/1")
    wait_for_title(page, "Step 1")
    rewards = [1.1, 0.4, 0.05, 1.45, 0.25, 0.0, 1.0]
    assert f"{sum(rewards) / len(rewards):.4g}" in text_of(page, ".tiles")
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["reward"] == pytest.approx(sum(rewards) / len(rewards))
