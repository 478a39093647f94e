"""Raw data sets and small models → what the stages read; one file per kind, each a `plaudit prepare` verb."""
