"""Engines that are servers: processes of another program, in an environment of its own, that get the policy's weights after every
step."""
