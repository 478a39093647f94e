"""`plaudit doctor`: checks of a recipe before it trains."""
