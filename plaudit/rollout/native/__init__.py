"""plaudit's own rollout engine, which samples with the trainer's modules and weights."""
