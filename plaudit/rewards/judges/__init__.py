"""Judges: rewards that query a model."""
