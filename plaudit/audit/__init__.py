"""Audits: rewards checked against labels, for biases and for exploits before training."""
