"""The example rewards of recipes/several_rms: a rule, two plugins, a similarity."""

import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from plaudit.scoring import Scorer
from support.judges import backend_of, collect, make
from support.paths import REPOSITORY
from support.rewards import group
from support.servers import similarity_service

FOLDER = REPOSITORY / "recipes/several_rms"
MODEL = {"url": "http://127.0.0.1:9", "placement": "server"}
TRUTH = {"Solution": 2, "Knowledge": [1, 3], "Response": "Agent: We refund you."}
ANSWER = TRUTH | {"Thought": "It is late, so a refund.", "ResponseSolution": "refund"}


def write(**changes: object) -> str:
    return f"Here it is: {json.dumps(ANSWER | changes)}"


@pytest.fixture
def example(monkeypatch) -> Iterator[ModuleType]:
    """bge_similarity.py, imported as in its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bge_similarity  # pyright: ignore[reportMissingImports]

    yield bge_similarity
    for name in ("bge_similarity", "response_json"):
        sys.modules.pop(name, None)


def test_the_rule_multiplies_a_tenth_for_each_mistake():
    responses = [
        write(),
        write(Solution=3),
        write(Solution=3, Knowledge=[]),
        write(Thought="t" * 1301),
        write(Response="We refund you."),
        "{}",
        "no object",
    ]
    with Scorer([{"kind": "function", "path": str(FOLDER / "rule.py")}]) as scorer:
        [scored] = scorer.score([{"prompt": "q", "ground_truth": json.dumps(TRUTH), "responses": responses}])
    assert scored["reward"] == pytest.approx([1.0, 0.1, 0.01, 0.1, 0.0, 0.0, 0.0])
    assert scored["malformed"] == [False, False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('<think>{"polite": 0}</think> So: {"polite": 1, "clear": 0}', 0.5),
        ('{"polite": 1}', 1.0),
        ('{"polite": 7}', None),
        ("{}", None),
        ("fine", None),
    ],
)
@pytest.mark.parametrize("name", ["rider_reward", "consistency_reward"])
def test_a_plugin_averages_its_marks(name, answer, value):
    reward = make("plugin", answer, path=str(FOLDER / f"{name}.py"), model=MODEL)
    [scored] = collect(reward, group(write()))
    [[score]] = scored.by_reward.values()
    assert score.value == value


def test_plugins_show_the_words_and_the_parts():
    for name, shown in (
        ("rider_reward", "Agent: We refund you."),
        ("consistency_reward", "Thoughts: It is late, so a refund.\nSolution: refund\nWords: Agent: We refund you."),
    ):
        reward = make("plugin", '{"x": 1}', path=str(FOLDER / f"{name}.py"), model=MODEL)
        collect(reward, group(write()))
        [(prompt, _)] = backend_of(reward).calls
        assert shown in prompt
        assert "{response}" not in prompt


def test_the_similarity_compares_the_words_of_response_and_reference(example, monkeypatch):
    with similarity_service(lambda *_: 0.75) as (url, received):
        monkeypatch.setattr(example, "URL", url)
        score = example.compute_score("service", write(), json.dumps(TRUTH))
    assert received == [{"sent1": "Agent: We refund you.", "sent2": "Agent: We refund you."}]
    assert score == {"score": pytest.approx(0.3 + 0.7 * 0.1**0.5), "cosine": 0.75}
    assert example.compute_score("service", "no object", json.dumps(TRUTH)) == {"score": 0.0, "malformed": True}


def test_the_similarity_is_scaled_as_in_the_source(example):
    assert [example.scale(x) for x in (-1.0, 0.65, 0.85, 1.0)] == pytest.approx([0.37, 0.37, 1.0, 1.0])
