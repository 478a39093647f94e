"""One file per training verb; each reads alone, top to bottom."""
