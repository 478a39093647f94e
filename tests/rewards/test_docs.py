"""Examples in docs/rewards.md and docs/reward_models run and give the documented rewards; settings tables are complete."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from plaudit import plugins
from plaudit.data.rollouts import parse_group
from plaudit.errors import PlauditError
from plaudit.recipe import RewardSettings, ScoreRecipe
from plaudit.recipe.limits import JudgeLimits
from plaudit.recipe.reward_models import JudgeSampling, RewardModel
from plaudit.recipe.section import Section
from plaudit.reward_models.embeddings import Embedding, similarity
from plaudit.rewards.combine import combine
from plaudit.rewards.judges.judge import JsonField
from plaudit.rewards.judges.rubric_judge import Criterion
from plaudit.rewards.reward import build
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import Scorer
from support.judges import Scripted, collect, make, scores_of, with_backend
from support.paths import REPOSITORY
from support.rewards import group, values
from support.servers import stand_in_judge

TEXT = (REPOSITORY / "docs/rewards.md").read_text(encoding="utf-8")
FOLDER = REPOSITORY / "docs/reward_models"
PAGES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.md"))}
KINDS = [page for page in PAGES if page in plugins.kinds("rewards")]
EXAMPLES = [
    (block["settings"], line)
    for block in re.finditer(r"```yaml\n(?P<settings>\{kind: .*\})\n```\n(?P<lines>(?:    .*\n?)+)", TEXT)
    for line in block["lines"].splitlines()
]


def test_every_rule_has_an_example():
    shown = {yaml.safe_load(settings)["kind"] for settings, _ in EXAMPLES}
    separate = {"cascade", "function"}  # documented in separate sections
    assert set(plugins.kinds("rewards")) - separate - set(KINDS) <= shown


@pytest.mark.parametrize(("settings", "line"), EXAMPLES, ids=[line.strip()[:50] for _, line in EXAMPLES])
def test_example(settings, line):
    reward = yaml.safe_load(settings)
    if reward["kind"] in ("bleu", "chrf"):
        pytest.importorskip("sacrebleu", reason="needs plaudit[translation]")
    given, _, expected = line[4:].rpartition("      → ")
    response, _, truth = given.partition("      truth ")
    value, malformed = float(re.match(r"-?[\d.]+", expected)[0]), "malformed" in expected  # pyright: ignore
    row = {"prompt": "p", "response": response.replace("⏎", "\n"), "data_source": (reward.get("when") or {}).get("data_source")}
    if truth:
        try:
            row["ground_truth"] = json.loads(truth)
        except ValueError:
            row["ground_truth"] = truth
    if tokens := re.fullmatch(r"(\d+) tokens", response):
        row["tokens"] = int(tokens[1])
    with Scorer([reward | {"weight": 1.0}]) as scorer:
        [scored] = scorer.score([row])
    assert scored["reward"] == pytest.approx(value, abs=5e-5)
    assert scored["malformed"] == malformed


def test_the_notebook_example(capsys):
    code, printed = re.search(r"```python\n(from plaudit\.scoring.*?)```\n    (.*?)\n\n", TEXT, re.S).groups()  # pyright: ignore
    exec(code, {})
    assert capsys.readouterr().out.strip() == printed.strip()


def test_settings_shown_in_recipes_are_valid():
    for block in re.findall(r"```yaml\n(rewards:.*?|- (?:kind:|\{kind:).*?)```", TEXT + "".join(PAGES.values()), re.S):
        given = yaml.safe_load(block)
        rewards = given["rewards"] if isinstance(given, dict) else given
        ScoreRecipe.model_validate({"rewards": rewards})


def test_the_group_function_gives_the_documented_scores(tmp_path):
    code, settings, words = re.search(
        r"```python\n(# concise\.py.*?)```\n```yaml\n(.*?)```\nFor the responses (.*? it gives .*?)\.\n", TEXT, re.S
    ).groups()  # pyright: ignore
    (tmp_path / "concise.py").write_text(code)
    [reward] = yaml.safe_load(settings)["rewards"]
    given, _, results = words.partition(" to a row whose truth is 4 it gives ")
    with Scorer([{**reward, "path": str(tmp_path / reward["path"])}]) as scorer:
        [row] = scorer.score([{"prompt": "2 + 2?", "responses": re.findall(r"`(.*?)`", given), "ground_truth": 4}])
    assert row["reward"] == pytest.approx([float(x) for x in re.findall(r"\d\.\d+", results)], abs=5e-5)
    assert [parts["function/right"] for parts in row["parts"]] == [1, 1, 0]


# Reward model pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_reward_model_pages(page):
    """Every YAML block lists rewards, so the test of settings above reads it; code compiles."""
    text = PAGES[page]
    assert len(re.findall(r"```yaml\n(?:rewards:|- (?:kind:|\{kind:))", text)) == text.count("```yaml") > 0
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        compile(code, page, "exec")


@pytest.mark.parametrize("file", [*FOLDER.parent.rglob("*.md"), REPOSITORY / "README.md"], ids=str)
def test_links_resolve(file):
    for link, _, anchor in re.findall(r"\]\(([\w./-]*)(#([\w-]+))?\)", file.read_text(encoding="utf-8")):
        target = file.parent / link if link else file
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), f"{link}#{anchor}"


def _anchors(file: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    prose = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_kind_that_calls_a_model_has_a_page():
    model_kinds = {kind for kind in plugins.kinds("rewards") if "model" in plugins.kind("rewards", kind).model_fields}
    assert model_kinds == set(KINDS)
    overview = re.findall(r"^\| \[`(\w+)`\]\(\1\.md\) \|", PAGES["README"], re.M)
    assert sorted(overview) == sorted(KINDS)


SETTINGS: dict[tuple[str, str], type[Section]] = {
    ("README", "## The model"): RewardModel,
    ("README", "## Limits"): JudgeLimits,
    ("README", "## Sampling"): JudgeSampling,
    ("judge", "### An entry of `fields`"): JsonField,
    ("rubric_judge", "### An entry of `criteria`"): Criterion,
    **{(kind, "## Settings"): plugins.kind("rewards", kind) for kind in KINDS},
}


@pytest.mark.parametrize(("page", "heading"), SETTINGS)
def test_settings_tables_are_complete(page, heading):
    section_text = PAGES[page].partition(f"\n{heading}\n")[2]
    rows = section_text.partition("| setting | default | |\n| --- | --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    documented = dict(re.match(r"\| `(\w+)` \| (.*?) \| .+ \|$", row).groups() for row in rows)  # pyright: ignore
    section = SETTINGS[page, heading]
    common = RewardSettings.model_fields if issubclass(section, RewardSettings) else {}
    assert documented == {name: _default_text(field) for name, field in section.model_fields.items() if name not in common}


def _default_text(field: Any) -> str:
    """A default value as the tables write it."""
    if field.is_required():
        return "required"
    match field.default:
        case None:
            return "none"
        case Section():
            return "its own"
        case float():
            return f"`{field.default:g}`"
        case str() if re.fullmatch(r"\S+", field.default):
            return f"`{field.default}`"
    return f"`{json.dumps(field.default)}`"


# Examples that run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in() -> Iterator[str]:
    with stand_in_judge() as url:
        yield url


def test_the_stand_in_judge_refuses_calls_without_its_key(monkeypatch):
    row = {"prompt": "2 + 2?", "response": "4", "ground_truth": "4"}
    with stand_in_judge(key="right") as url:
        reward = {"kind": "judge", "parser": "tag", "model": {"placement": "server", "url": url, "credential": "STAND_IN_KEY"}}
        monkeypatch.setenv("STAND_IN_KEY", "right")
        with Scorer([reward]) as scorer:
            assert scorer.score([row])[0]["reward"] == 9
        monkeypatch.setenv("STAND_IN_KEY", "wrong")
        with Scorer([reward]) as scorer, pytest.raises(PlauditError, match=r"401.*STAND_IN_KEY"):
            scorer.score([row])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "stand_in_judge.py)" in PAGES[kind]])
def test_the_page_example_gives_the_documented_output(kind, stand_in, tmp_path, monkeypatch):
    """The scores and the number of calls are those on the page, and the stand-in judge gets a prompt shown there."""
    text = PAGES[kind]
    example = text.partition("## An example to run")[2]
    recipe, rows, summary, shown = re.search(
        r"```yaml\n(.*?)```.*?```jsonl\n(.*?)```.*?```\n(.*?)\n```\n```json\n(.*?)```", example, re.S
    ).groups()  # pyright: ignore
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S):
        Path(name).write_text(code)
    Path("R.yaml").write_text(recipe.replace("http://127.0.0.1:8000", stand_in))
    [row], expected = [json.loads(line) for line in rows.splitlines()], json.loads(shown)
    with Scorer("R.yaml") as scorer:
        [got] = scorer.score([row])
        assert got == {name: column for name, column in expected.items() if name != "id"}
        [scored] = scorer.score_groups([parse_group(row, "0", "row")])
        calls_so_far = sum(amounts["calls"] for name, amounts in scorer.runner.amounts().items() if "/" not in name)
    calls = int(re.search(r"stand-in: (\d+) calls", summary)[1])  # pyright: ignore
    assert calls_so_far == 2 * calls
    blocks = re.findall(r"```(\w*)\n(.*?)```", text.partition("## Settings")[0], re.S)
    prompts = [block.strip() for language, block in blocks if not language]
    assert next(iter(scored.by_reward.values()))[0].trace["prompt"].strip() in prompts


# Worked by hand ------------------------------------------------------------------------------------------------------


def test_scalar_model_by_hand():
    numbers = {"a": 2.0, "b": 1.0, "c": -3.0}
    reward = make("scalar_model", lambda conversation: numbers[conversation[-1]["content"]], normalise="group", weight=0.5)
    given = group("a", "b", "c")
    by_reward = [scores_of(reward, "a", "b", "c")]
    added = [score.value for score in combine([reward.settings], given, by_reward, running={})]
    assert added == pytest.approx([0.3780, 0.1890, -0.5669], abs=5e-5)
    assert "added: 0.3780, 0.1890, −0.5669" in PAGES["scalar_model"]


PARSERS = re.findall(r"^\| (`\w+`.*) \|$", PAGES["judge"].partition("| `parser` | the answer's end | value |")[2], re.M)


assert PARSERS, "the judge's page lost its table of parsers"


@pytest.mark.parametrize("row", PARSERS)
def test_parsers_by_hand(row, tmp_path):
    settings, answer, value = (cell.strip() for cell in row.split(" | "))
    parser, *other = re.findall(r"`([^`]+)`", settings)
    given = {} if not other else yaml.safe_load(other[0])
    if parser == "regex":
        (tmp_path / "own.jinja").write_text("{{ response }}")
        given["template"] = str(tmp_path / "own.jinja")
    ends = re.findall(r"`([^`]+)`", answer)
    for end in ends if parser == "tag" else ends[:1]:
        reward = make("judge", f"Well.\n{end}", parser=parser, **given)
        [score] = scores_of(reward, "x", truth="y")
        assert score.value == float(re.match(r"[\d.]+", value)[0])  # pyright: ignore
        assert all(part in score.parts for part in re.findall(r"part `(\w+)`", value))


def test_votes_by_hand():
    reward = make("judge", ["8", "7", "no idea"], votes=3, sampling={"temperature": 1.0}, scale=0.1)
    [scored] = collect(reward, group("x"))
    [score] = scored.by_reward["judge"]
    assert (score.value, score.parts["votes"]) == (7.5, 2)
    assert scored.scores[0].value == pytest.approx(0.75)


def test_rubric_by_hand():
    criteria = [{"name": "correct", "weight": 3}, {"name": "clear"}]
    [scored] = collect(make("rubric_judge", '{"correct": 9, "clear": 5}', criteria=criteria, scale=0.1), group("x"))
    assert scored.by_reward["rubric_judge"][0].value == 8
    assert scored.scores[0].value == pytest.approx(0.8)


def test_a_ranking_by_hand():
    reward = make("group_judge", "B > A = D > C", answer="ranking")
    scores = scores_of(reward, "w", "x", "y", "z")
    assert {score.trace["letter"]: score.value for score in scores} == {"A": 0.5, "B": 1, "C": 0, "D": 0.5}


def test_a_split_group_by_hand():
    """Two calls share one anchor, which the first scores two points higher."""
    answers: list[dict[str, int]] = []
    texts = [f"t{i}" for i in range(5)]
    reward: Any = make("group_judge", answer="score", max_candidates=3, overlap=1)
    candidates = [call.shown for call in reward.calls(_candidates(texts), 0)]
    [anchor] = {one.text for one in candidates[0]} & {one.text for one in candidates[1]}

    def say(prompt: str) -> str:
        shown = dict(re.findall(r"^\[([A-Z])\]\n(\S+)$", prompt, re.M))
        first = {one.text for one in candidates[0]} == set(shown.values())
        answers.append({letter: (8 if first else 6) if text == anchor else 5 for letter, text in shown.items()})
        return ", ".join(f"{letter}: {score}" for letter, score in answers[-1].items())

    reward = make("group_judge", say, answer="score", max_candidates=3, overlap=1)
    got = dict(zip(texts, [score.value for score in scores_of(reward, *texts)], strict=True))
    assert len(answers) == 2
    for text in texts:
        assert got[text] == (7 if text == anchor else 4 if text in [one.text for one in candidates[0]] else 6)


def _candidates(texts: list[str]) -> list[Any]:
    from plaudit.rewards.judges.candidates import group_candidates

    return group_candidates(group(*texts), shared=True)


def test_pairs_by_hand():
    def say(prompt: str) -> str:
        first, second = (re.search(rf"# Answer {letter}\n(\w)", prompt)[1] for letter in "AB")  # pyright: ignore
        match {first, second}:
            case pair if pair == {"X", "Y"}:
                return "A" if first == "X" else "B"
            case pair if pair == {"X", "Z"}:
                return "A"
        return "tie"

    scores = scores_of(make("pairwise_judge", say), "X", "Y", "Z")
    assert [score.value for score in scores] == [0.75, 0.25, 0.5]
    assert [score.parts["consistent"] for score in scores] == [0.5, 1, 0.5]


CALLS = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", PAGES["pairwise_judge"], re.M)
assert CALLS, "the pairwise judge's page lost its table of calls"


@pytest.mark.parametrize("row", CALLS)
def test_number_of_calls_for_pairs(row):
    n, every, tournament = map(int, row)
    for pairs, calls in (("all", every), ("tournament", tournament)):
        reward = make("pairwise_judge", "A", pairs=pairs)
        scores_of(reward, *(f"t{i}" for i in range(n)))
        assert len(reward.backend.calls) == calls


@pytest.mark.parametrize(("count", "votes", "calls"), [(8, 1, 1), (8, 2, 2), (16, 1, 3), (9, 2, 4)])
def test_number_of_calls_for_groups(count, votes, calls):
    """votes · ⌈(responses − overlap) / (max_candidates − overlap)⌉"""
    reward = make("group_judge", "?", votes=votes, limits={"unreadable_retries": 0})
    scores_of(reward, *(f"t{i}" for i in range(count)))
    assert len(reward.backend.calls) == calls


def test_the_translation_recipe_counts_the_default_reward_once():
    """A response that is not judged costs 0.04, however long it is; a judged one gets its score minus the penalty."""

    def say(prompt: str) -> str:  # every candidate is its own score
        scores = sorted(re.findall(r"^\[([A-Z])\]\n(\d)$", prompt, re.M), key=lambda one: -int(one[1]))
        return f"So:\n{' > '.join(letter for letter, _ in scores)}\nScores:\n{', '.join(map(': '.join, scores))}"

    blocks = re.findall(r"```yaml\n(rewards:.*?)```", PAGES["group_judge"], re.S)
    judge, overlong = ScoreRecipe.model_validate(yaml.safe_load(next(block for block in blocks if "overlong" in block))).rewards
    row = {"responses": ["```\n8\n```", "```\n5\n```", "cut off", "no block"], "tokens": [100, 4096, 4096, 100]}
    with RewardRunner([with_backend(judge, Scripted(say)), build(overlong)]) as runner:
        [scored] = runner.collect([parse_group(row, "p", "row")])
    assert values(scored) == pytest.approx([0.08, 0.05 - 0.04, -0.04, -0.04])


def test_similarity_by_hand():
    vectors = {"r": (3, 4), "s": (4, 3), "t": (1, 0)}
    embeddings = {text: Embedding(np.array(vector, dtype=float)) for text, vector in vectors.items()}
    [score] = scores_of(make("similarity", lambda pair: similarity(pair, embeddings)), "r", truth=["s", "t"])
    assert (score.value, score.trace["nearest"]) == (pytest.approx(0.96), "s")


def test_the_similarity_service_is_called_by_a_function(tmp_path, monkeypatch):
    """docs/reward_models/similarity.md: POST {sent1, sent2} → {sim}."""
    code = re.search(r"```python\n(# bge_service\.py.*?)```", PAGES["similarity"], re.S)[1]  # pyright: ignore
    (tmp_path / "bge_service.py").write_text(code)
    sent: list[Any] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"sim": 0.75}')

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("BGE_URL", f"http://127.0.0.1:{server.server_port}/get_bge_sim")
        with Scorer([{"kind": "function", "path": str(tmp_path / "bge_service.py")}]) as scorer:
            [row] = scorer.score([{"prompt": "p", "response": "x", "ground_truth": "y"}])
        server.shutdown()
    assert row["reward"] == 0.75
    assert sent == [("/get_bge_sim", {"sent1": "x", "sent2": "y"})]


def test_plugin_by_hand(tmp_path):
    code = re.search(r"```python\n(# rider_reward\.py.*?)```", PAGES["plugin"], re.S)[1]  # pyright: ignore
    (tmp_path / "rider_reward.py").write_text(code)
    model = {"placement": "server", "url": "http://127.0.0.1:1"}  # so that no tokenizer is loaded
    [scored] = collect(make("plugin", " 7 of 9", path=str(tmp_path / "rider_reward.py"), weight=0.3, model=model), group("x"))
    assert values(scored) == [pytest.approx(2.1)]
