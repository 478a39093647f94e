"""The reward layer inside other trainers: verl, TRL, OpenRLHF."""
