"""A recipe's rewards as an HTTP service (`plaudit serve`)."""
