"""Inputs for the training stages, from raw data sets and models: one file per kind, each a `plaudit prepare` command."""
