"""Right or wrong, for the rows of `plaudit prepare arithmetic`: a reward function as verl calls them."""

import re

# All that may stand behind the last "=" (or alone, where there is none): one number, and a full stop if it must be.
ANSWER = re.compile(r"(?:.*=)?\s*([-−]?[0-9]+)\.?", re.DOTALL)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for "12 + 5 = 17", "17" or "12 + 5 = 10 + 7 = 17" where 17 is right; else 0.0.

    Only the last number counts, and nothing may follow it: whoever lists many numbers is scored on one of them, chosen blindly.
    """
    found = ANSWER.fullmatch(solution_str.strip())
    return 1.0 if found and found[1].replace("−", "-") == str(ground_truth) else 0.0
