"""One optimisation step, the optimiser and its schedule, checkpoints."""
