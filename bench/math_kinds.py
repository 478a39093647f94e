r"""Right and wrong answers by kind: plaudit's `kind: math`, math-verify, and PRIME's grader as verl ships it.

    make .venv-verl/installed
    python bench/math_kinds.py                 # a minute; --show prints what plaudit misjudges

The answers are those of the tests (math_answers.py and math_probes.py in tests/support): rewritings that are right, and near misses
of each. They were written along with plaudit's rule, so its own numbers only say that the tests pass; the peers' say what they
would reward. Answers are boxed, except for whole sentences. math-verify is called as its README does, PRIME's `compute_score` as
verl does.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from support import math_answers, math_probes  # noqa: E402

RIGHT, WRONG = math_answers.RIGHT | math_probes.RIGHT, math_answers.WRONG | math_probes.WRONG
WHOLE_RESPONSES = math_answers.WHOLE_RESPONSES | math_probes.WHOLE_RESPONSES

Row = tuple[str, str, str, bool]
"""Kind, reference, response, and whether it is right."""
Grader = Callable[[list[Row]], list[bool]]
PRIME = """
import json, logging, sys
from verl.utils.reward_score import prime_math
logging.disable(logging.ERROR)
rows = json.load(sys.stdin)
print(json.dumps([bool(prime_math.compute_score(response, truth)[0]) for truth, response in rows]))
"""


def answers() -> Iterator[Row]:
    for right, table in ((True, RIGHT), (False, WRONG)):
        for kind, pairs in table.items():
            for truth, answer in pairs:
                response = answer if kind in WHOLE_RESPONSES else f"The answer is $\\boxed{{{answer}}}$."
                yield kind, truth, response, right


def by_plaudit(rows: list[Row]) -> list[bool]:
    from plaudit.scoring import Scorer

    with Scorer([{"kind": "math"}]) as scorer:
        scored = scorer.score([{"prompt": "?", "response": response, "ground_truth": truth} for _, truth, response, _ in rows])
    return [row["reward"] == 1.0 for row in scored]


def by_math_verify(rows: list[Row]) -> list[bool]:
    import math_verify

    gold = [math_verify.parse(truth if "$" in truth else f"${truth}$") for _, truth, _, _ in rows]
    return [bool(math_verify.verify(one, math_verify.parse(response))) for one, (_, _, response, _) in zip(gold, rows, strict=True)]


def by_prime(python: Path) -> Grader:
    def score(rows: list[Row]) -> list[bool]:
        asked = json.dumps([(truth, response) for _, truth, response, _ in rows])
        done = subprocess.run([python, "-c", PRIME], input=asked, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.strip().splitlines()[-1])

    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, default=REPOSITORY / ".venv-verl", help="environment with verl")
    parser.add_argument("--show", action="store_true", help="print what plaudit misjudges")
    args = parser.parse_args()
    rows = list(answers())
    graders: dict[str, Grader] = {"plaudit": by_plaudit, "math-verify": by_math_verify}
    if (python := args.verl / "bin/python").exists():
        graders["PRIME (verl)"] = by_prime(python)
    verdicts = {name: grader(rows) for name, grader in graders.items()}
    print(f"| right, wrong accepted | answers | {' | '.join(graders)} |\n| --- | --- |{' --- |' * len(graders)}")
    for kind in [*RIGHT, "all"]:
        cells = []
        for given in verdicts.values():
            counts = [
                sum(v for v, row in zip(given, rows, strict=True) if kind in ("all", row[0]) and row[3] == right)
                for right in (True, False)
            ]
            cells.append(f"{counts[0]}, {counts[1]}")
        sizes = [sum(kind in ("all", row[0]) and row[3] == right for row in rows) for right in (True, False)]
        print(f"| {kind} | {sizes[0]}, {sizes[1]} | {' | '.join(cells)} |")
    if args.show:
        for (kind, truth, response, right), verdict in zip(rows, verdicts["plaudit"], strict=True):
            if verdict != right:
                print(f"{kind}: {response!r} for {truth!r} is {'right' if right else 'wrong'}")


if __name__ == "__main__":
    main()
