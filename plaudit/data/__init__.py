"""From files to tokens: rows, conversations, chat templates and masks, packing, order."""
