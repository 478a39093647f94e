"""Reward models wherever they run: in this process, behind a URL, or on a server started for them."""
