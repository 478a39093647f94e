"""plaudit's rewards in other trainers: verl, TRL, OpenRLHF."""
