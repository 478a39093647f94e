"""`plaudit view`: runs and dumps of rollouts in a browser. Reads only; nothing is written to a run."""
