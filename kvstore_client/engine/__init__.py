"""For any engine: failures as misses, lookups and transfers in the background."""
