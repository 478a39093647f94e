"""The rule of the demo: is a customer-service answer well-formed, and does it choose the right solution? From 0 to 1.

0 unless it is a JSON object with all keys and speaks to the customer ("Agent: …"); then 1, times 0.1 for each of: thoughts that are
empty or longer than 1300 characters, another solution than the reference's, other knowledge than the reference's.
"""

import json

from response_json import read_response

SPEAKER = "Agent:"
LONGEST_THOUGHT = 1300


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    response = read_response(solution_str)
    if response is None or not str(response["Response"]).startswith(SPEAKER):
        return {"score": 0.0, "malformed": True}
    truth = json.loads(ground_truth)
    checks = {
        "thought": 0 < len(str(response["Thought"])) <= LONGEST_THOUGHT,
        "solution": response["Solution"] == truth["Solution"],
        "knowledge": response["Knowledge"] == truth["Knowledge"],
    }
    return {"score": 0.1 ** sum(not fine for fine in checks.values()), **{name: float(fine) for name, fine in checks.items()}}
