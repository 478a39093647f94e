"""The RL step: collecting scored groups and training on them."""
