"""Reward models wherever they live: in this process, behind a URL, or in a server that is started for them."""
