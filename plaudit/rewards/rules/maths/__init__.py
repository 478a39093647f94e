"""Internals of the `math` rule: answers as text, LaTeX parsed into formulas, formulas compared by value."""
