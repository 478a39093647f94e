"""The engine that is plaudit's own: it samples with the modules and weights that the trainer updates."""
