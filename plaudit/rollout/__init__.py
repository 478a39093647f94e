"""Sampling: the engine contract, our native engine, and vLLM."""
