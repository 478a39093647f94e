"""Rewards: rules, judges and functions, and what calls and combines them."""
