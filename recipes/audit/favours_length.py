"""Broken on purpose: half of the reward is for the number of words, as with many reward models; a policy learns to go on and on."""


def compute_score(solution_str, ground_truth):
    right = solution_str.rsplit("####", 1)[-1].strip().replace(",", "") == str(ground_truth).replace(",", "")
    return 0.5 * right + 0.5 * min(1.0, len(solution_str.split()) / 100)
