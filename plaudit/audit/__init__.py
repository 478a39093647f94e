"""A reward checked against labels, biases and exploits before training."""
