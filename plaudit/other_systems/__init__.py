"""Settings of other systems as data: one table per system, key → what it is here. Used by `plaudit convert` and by the hints in
messages about unknown settings (`plaudit/suggestions.py`)."""
