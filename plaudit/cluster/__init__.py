"""The same trainer, engine and reward runner as Ray actors. Nothing else knows of ray."""
