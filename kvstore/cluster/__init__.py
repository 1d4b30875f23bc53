"""Where a key lives: placement over shards."""
