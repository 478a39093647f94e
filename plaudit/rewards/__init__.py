"""One file is one kind of reward; beside them the view (what is scored), the combiner, and the runner."""
