"""What the `math` rule knows: answers as text, LaTeX as formulas, formulas as values."""
