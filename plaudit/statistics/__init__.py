"""Pure numpy functions on which evaluation is built: arrays in, numbers with intervals out. No config, no I/O, no torch."""
