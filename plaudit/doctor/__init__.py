"""Everything that can be known about a recipe before it trains."""
