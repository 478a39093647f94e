"""The RL step, whoever runs it."""
