"""Sampling: the engine contract and our native engine."""
