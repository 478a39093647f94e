"""Pure tensor functions: arrays in, arrays out. No config, no I/O, no ray."""
