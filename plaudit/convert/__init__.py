"""`plaudit convert`: settings of other systems become a recipe."""
