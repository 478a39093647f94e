"""Programs that serve models: how they are started, watched and stopped."""
