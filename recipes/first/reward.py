"""How close an answer is to "It will be Monday.", where Monday is right: a reward function of your own, as verl calls them."""

from difflib import SequenceMatcher


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for the whole sentence, less for a part of it: a model that knows nothing yet gets a hint from every sample."""
    return SequenceMatcher(None, solution_str, f"It will be {ground_truth}.", autojunk=False).ratio()
