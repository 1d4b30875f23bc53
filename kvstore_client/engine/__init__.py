"""Modules that any engine can use: failures become misses; lookups and transfers run in the background."""
