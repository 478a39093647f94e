"""Items by how much longer one answer is than another."""

import numpy as np

BINS = 10


def length_bins(difference: np.ndarray, bins: int = BINS) -> np.ndarray:
    """The bin of each length difference, from 0: by quantiles, so that each has about as many items."""
    # Equal differences share the quantile in their middle, and so a bin.
    _, level, counts = np.unique(difference, return_inverse=True, return_counts=True)
    quantile = ((np.cumsum(counts) - counts / 2) / max(1, len(difference)))[level]
    return (quantile * bins).astype(np.intp)
