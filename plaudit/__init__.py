"""Plaudit trains language models with reward models."""

__version__ = "0.1.0"
