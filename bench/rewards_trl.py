"""TRL's side of rewards.py: the same answers scored by TRL's `accuracy_reward`. Run in .venv-trl: rewards_trl.py JOB OUT"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rewards_mix import SYMBOLIC_ONLY, timed
from trl.rewards import accuracy_reward


def main(job: dict[str, Any]) -> dict[str, Any]:
    def score(samples: list[dict[str, Any]]) -> list[float | None]:
        completions = [[{"role": "assistant", "content": sample["response"]}] for sample in samples]
        # Its parser looks for formulas between dollars, as solutions of TRL's data sets are written.
        solutions = [f"${sample['ground_truth']}$" for sample in samples]
        return accuracy_reward(completions, solutions)

    score(job["samples"][:50])
    scores, whole = timed(score, job["samples"])
    _, symbolic = timed(score, [sample for sample in job["samples"] if sample["symbolic"]][:SYMBOLIC_ONLY])
    versions = {name: version(name) for name in ("trl", "math-verify", "sympy")}
    return {"versions": versions, "scores": scores, "all": whole, "symbolic": symbolic}


if __name__ == "__main__":
    job_file, out_file = map(Path, sys.argv[1:])
    out_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
