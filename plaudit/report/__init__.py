"""Human-readable output: terminal progress, curves, sample tables."""
