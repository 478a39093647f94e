"""Ranking, preference and verifier accuracy, pass@k, translation quality."""
