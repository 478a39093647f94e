"""One file is one kind of reward; beside them the combiner, the worker processes, and the runner."""
