"""Rules: rewards that are plain functions of a sample."""
