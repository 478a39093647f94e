"""`python -m plaudit` is the `plaudit` command."""

from plaudit.cli import main

main()
