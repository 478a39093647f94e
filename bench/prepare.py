"""Time of `plaudit prepare` next to plain pandas scripts that make the same rows.

    python bench/prepare.py                                  # 100,000 generated rows; about ten minutes on two cores
    python bench/prepare.py --rows 5000 --verbs math-rl      # less

The scripts are written as such scripts usually are: `read_parquet`, a loop over `iterrows()`, f-strings for prompts (no template
engine), a list of dicts, `DataFrame(...).to_parquet()`. They check nothing; plaudit checks every row. Each side runs in a process
of its own, without the time of its imports; best of --repeat runs. Rows of both are compared before anything is timed: equal but
for their order, or, where rows are drawn at random, of the same number on average.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LETTERS = "ABCDEFGH"
NAMES = {"en": "English", "de": "German", "zh": "Chinese", "fr": "French"}
GROUP_TEMPLATE = """Compare translations from {{ extra_info.src_language }} into {{ extra_info.trg_language }}, then rank them.

Source text:
```
{{ extra_info.src_text }}
```

{% for candidate in candidates %}
Translation {{ candidate.letter }}:
```
{{ candidate.text }}
```
{% endfor %}
"""
SCORE_TEMPLATE = "Score this translation from {{ extra_info.src_language }}.\n\n{{ extra_info.src_text }}\n\n{{ response }}\n"
RUBRIC_TEMPLATE = "Question:\n{{ question }}\n\nScoring Criteria:\n{{ extra_info.criteria }}\n\nStudent's Answer:\n{{ response }}\n"
WORDS = "the a grey goose river watches while seventeen lazy dogs jump over quick foxes and nobody says anything"
INSTRUCTION = "Put the answer in \\boxed{}."
VERBS = {
    "ranking-sft": {},
    "ranking-rl": {},
    "ranking-rl, 4 subgroups and 4 orders": {"subgroup_augment": 4, "shuffle_augment": 4},
    "pointwise-sft": {},
    "pointwise-rl": {},
    "translation-sft": {},
    "translation-rl": {},
    "translation-rl, cross-lingual": {"cross_lingual": True},
    "math-rl": {},
    "rubric-rl": {},
}
DRAWN = ("ranking-rl, 4 subgroups and 4 orders", "translation-rl, cross-lingual")


# Input ---------------------------------------------------------------------------------------------------------------


def make_input(folder: Path, rows: int) -> None:
    """groups.parquet, texts.parquet, questions.parquet, graded.parquet; the templates."""
    rng = np.random.default_rng(0)
    words = np.array(re.findall(r"\w+", WORDS))
    pool = [" ".join(words[rng.integers(0, len(words), size)]) for size in rng.integers(8, 40, 5000)]

    def texts(count: int) -> list[str]:
        return [pool[i] for i in rng.integers(0, len(pool), count)]

    sources, sizes = [f"{text} {i}" for i, text in enumerate(texts(rows))], rng.integers(2, 5, rows).tolist()
    targets = np.array(["de", "zh", "fr"])[rng.integers(0, 3, rows)].tolist()
    languages = {"src_text": sources, "src_lang": ["en"] * rows, "trg_lang": targets}
    groups = {
        **languages,
        "mt_texts": [texts(size) for size in sizes],
        "scores": [rng.integers(0, 11, size).tolist() for size in sizes],
        "analysis": ["\n".join(f"Translation {LETTERS[j]}: minor style, major grammar." for j in range(size)) for size in sizes],
    }
    blocks = [f"{text}\n\n```\n{other}\n```" for text, other in zip(texts(rows), texts(rows), strict=True)]
    scored = {
        "question": sources,
        "criteria": texts(rows),
        "answer": texts(rows),
        "score": (rng.integers(0, 11, rows) / 10).tolist(),
    }
    tables = {
        "groups": groups,
        "texts": {**languages, "trg_text": texts(rows), "response": blocks},
        "questions": {"question": sources, "answer": rng.integers(0, 1000, rows).astype(str).tolist(), "source": ["gen"] * rows},
        "graded": scored,
    }
    for name, table in tables.items():
        pd.DataFrame(table).to_parquet(folder / f"{name}.parquet", index=False)
    for name, template in (("group", GROUP_TEMPLATE), ("score", SCORE_TEMPLATE), ("rubric", RUBRIC_TEMPLATE)):
        (folder / f"{name}.jinja").write_text(template)


# plaudit -------------------------------------------------------------------------------------------------------------


def plaudit_side(verb: str, folder: Path, out: Path) -> Callable[[], Any]:
    from plaudit.prepare import maths, pointwise, ranking, rubric, translation

    settings, name = VERBS[verb], verb.partition(",")[0]
    groups, texts = [folder / "groups.parquet"], [folder / "texts.parquet"]
    group, score = {"template": folder / "group.jinja"}, {"template": folder / "score.jinja"}
    return {
        "ranking-sft": lambda: ranking.make_ranking_sft(groups, out, **group),
        "ranking-rl": lambda: ranking.make_ranking_rl(groups, out, **group, **settings),
        "pointwise-sft": lambda: pointwise.make_pointwise_sft(groups, out, **score),
        "pointwise-rl": lambda: pointwise.make_pointwise_rl(groups, out, **score),
        "translation-sft": lambda: translation.make_translation_sft(texts, out),
        "translation-rl": lambda: translation.make_translation_rl(texts, out, **settings),
        "math-rl": lambda: maths.make_math_rl([folder / "questions.parquet"], out, instruction=INSTRUCTION),
        "rubric-rl": lambda: rubric.make_rubric_rl(
            [folder / "graded.parquet"], out, template=folder / "rubric.jinja", columns=rubric.GradedColumns()
        ),
    }[name]


# pandas --------------------------------------------------------------------------------------------------------------


def rl_row(source: str, prompt: str, ability: str, truth: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    reward = {"style": "rule" if truth is not None else "model", "ground_truth": truth}
    messages = [{"role": "user", "content": prompt}]
    return {"data_source": source, "prompt": messages, "ability": ability, "reward_model": reward, "extra_info": extra}


def sft_row(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def group_prompt(row: Any, texts: list[str]) -> str:
    shown = "".join(f"Translation {LETTERS[i]}:\n```\n{text}\n```\n" for i, text in enumerate(texts))
    languages = f"from {NAMES[row['src_lang']]} into {NAMES[row['trg_lang']]}"
    return f"Compare translations {languages}, then rank them.\n\nSource text:\n```\n{row['src_text']}\n```\n\n{shown}"


def languages_of(row: Any, target: str | None = None) -> dict[str, str]:
    source, target = row["src_lang"], target or row["trg_lang"]
    names = {"src_language": NAMES[source], "trg_language": NAMES[target]}
    return {"src_text": row["src_text"], "src_lang": source, "trg_lang": target, **names}


def ranked(scores: list[int]) -> tuple[str, str]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    ranking = LETTERS[order[0]]
    for a, b in pairwise(order):
        ranking += (" = " if scores[a] == scores[b] else " > ") + LETTERS[b]
    return ranking, ", ".join(f"{LETTERS[i]}: {scores[i]}" for i in order)


def orders(places: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    found = {places: None}
    while len(found) < min(1 + count, factorial(len(places))):
        found[tuple(random.sample(places, len(places)))] = None
    return list(found)


def arrangements(size: int, subgroups: int, shuffles: int) -> list[tuple[int, ...]]:
    subsets = [subset for count in range(2, size) for subset in combinations(range(size), count)]
    random.shuffle(subsets)
    return [order for places in [tuple(range(size)), *subsets[:subgroups]] for order in orders(places, shuffles)]


def ranking_sft(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        ranking, line = ranked(list(row["scores"]))
        answer = f"{row['analysis'].strip()}\n\nRanking:\n{ranking}\nScores:\n{line}"
        rows.append(sft_row(group_prompt(row, list(row["mt_texts"])), answer))
    return rows


def ranking_rl(frame: pd.DataFrame, subgroup_augment: int = 0, shuffle_augment: int = 0) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        for places in arrangements(len(row["scores"]), subgroup_augment, shuffle_augment):
            texts, scores = [row["mt_texts"][i] for i in places], [int(row["scores"][i]) for i in places]
            truth = json.dumps(dict(zip(LETTERS, scores, strict=False)))
            extra = {**languages_of(row), "analysis": row["analysis"], "candidates": texts, "shuffle_indices": list(places)}
            rows.append(rl_row("mt_ranking", group_prompt(row, texts), "ranking", truth, extra))
    return rows


def score_prompt(row: Any, text: str) -> str:
    return f"Score this translation from {NAMES[row['src_lang']]}.\n\n{row['src_text']}\n\n{text}"


def pointwise_sft(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        for text, score, line in zip(row["mt_texts"], row["scores"], row["analysis"].split("\n"), strict=True):
            rows.append(sft_row(score_prompt(row, text), f"{line.partition(':')[2].strip()}\n\n{score}"))
    return rows


def pointwise_rl(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        for text, score in zip(row["mt_texts"], row["scores"], strict=True):
            extra = {**languages_of(row), "candidate": text}
            rows.append(rl_row("mt_score", score_prompt(row, text), "scoring", str(score), extra))
    return rows


TRANSLATION = (Path(__file__).parent.parent / "plaudit/prepare/prompts/translation.jinja").read_text().removesuffix("\n")
BEFORE, BETWEEN, AFTER, END = re.split(r"\{\{.*?\}\}", TRANSLATION)


def translation_prompt(row: Any, target: str) -> str:
    """The built-in prompt, cut at its variables."""
    return f"{BEFORE}{NAMES[row['src_lang']]}{BETWEEN}{NAMES[target]}{AFTER}{row['src_text']}{END}"


def translation_sft(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [sft_row(translation_prompt(row, row["trg_lang"]), row["response"].strip()) for _, row in frame.iterrows()]


def translation_rl(frame: pd.DataFrame, cross_lingual: bool = False) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        others = [code for code in NAMES if code not in (row["src_lang"], row["trg_lang"])]
        for target in [row["trg_lang"], *([random.choice(others)] if cross_lingual else [])]:
            extra: dict[str, Any] = languages_of(row, target)
            extra["trg_text"] = row["trg_text"] if target == row["trg_lang"] else None
            extra["question"] = f"Translate from {extra['src_language']} into {extra['trg_language']}:\n\n{row['src_text']}"
            rows.append(rl_row("translation", translation_prompt(row, target), "translation", None, extra))
    return rows


def math_rl(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for index, row in frame.iterrows():
        extra = {"split": "train", "index": index, "question": row["question"], "solution": row["answer"]}
        made = rl_row("math", f"{row['question']} {INSTRUCTION}", "math", row["answer"], extra)
        rows.append({**made, "source": row["source"]})
    return rows


def rubric_rl(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for _, row in frame.iterrows():
        question, criteria, answer = row["question"], row["criteria"], row["answer"]
        prompt = f"Question:\n{question}\n\nScoring Criteria:\n{criteria}\n\nStudent's Answer:\n{answer}"
        extra = {"question": question, "criteria": criteria, "answer": answer}
        rows.append(rl_row("grade", prompt, "grading", f"{row['score']:g}", extra))
    return rows


def pandas_side(verb: str, folder: Path, out: Path) -> Callable[[], Any]:
    name = verb.partition(",")[0].replace("-", "_")
    files = {"ranking": "groups", "pointwise": "groups", "translation": "texts", "math": "questions", "rubric": "graded"}
    file = folder / f"{files[name.partition('_')[0]]}.parquet"

    def run() -> None:
        frame = pd.read_parquet(file)
        made = pd.DataFrame(globals()[name](frame, **VERBS[verb]))
        if name.endswith("sft"):
            made = made.sample(frac=1, random_state=0)
        made.to_parquet(out, index=False)

    return run


# Comparison ----------------------------------------------------------------------------------------------------------


def timed(side: str, verb: str, folder: Path) -> tuple[float, float, int]:
    """Seconds of wall-clock and CPU time, and rows, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--verbs", verb, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def run_side(side: str, verb: str, folder: Path) -> None:
    out = folder / f"{side}.parquet"
    out.unlink(missing_ok=True)
    make = (plaudit_side if side == "plaudit" else pandas_side)(verb, folder, out)
    wall, cpu = time.perf_counter(), time.process_time()
    make()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps([wall, cpu, len(pd.read_parquet(out, columns=[]).index)]))


def require_same_rows(verb: str, folder: Path) -> None:
    from plaudit.data.rows import read_rows

    made = []
    for side in ("plaudit", "pandas"):
        timed(side, verb, folder)
        made.append(list(read_rows(folder / f"{side}.parquet")))
    if verb in DRAWN:
        assert abs(len(made[0]) / len(made[1]) - 1) < 0.05, f"{verb}: {len(made[0])} rows, not {len(made[1])}"
    else:
        ours, theirs = (sorted(json.dumps(row, sort_keys=True) for row in rows) for rows in made)
        different = next((pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]), None)
        assert different is None, f"{verb}: rows differ:\n{different[0]}\n{different[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--side", choices=["plaudit", "pandas"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.side:
        return run_side(settings.side, settings.verbs[0], settings.folder)
    with tempfile.TemporaryDirectory() as name:
        small, tenth, large = (Path(name, part) for part in ("small", "tenth", "large"))
        for folder, rows in ((small, 1000), (tenth, settings.rows // 10), (large, settings.rows)):
            folder.mkdir()
            make_input(folder, rows)
        print("| verb | rows made | pandas, s (CPU) | plaudit, s (CPU) | ratio (CPU) |\n| --- | --- | --- | --- | --- |")
        for verb in settings.verbs:
            require_same_rows(verb, small)
            folder = tenth if "orders" in verb else large  # it makes ten rows of each
            best = [min(timed(side, verb, folder) for _ in range(settings.repeat)) for side in ("pandas", "plaudit")]
            (wall, cpu, _), (own_wall, own_cpu, count) = best
            ratios = f"{wall / own_wall:.1f}× ({cpu / own_cpu:.1f}×)"
            print(f"| {verb} | {count:,} | {wall:.1f} ({cpu:.1f}) | {own_wall:.2f} ({own_cpu:.2f}) | {ratios} |", flush=True)
    return None


if __name__ == "__main__":
    main()
