"""Moves blocks between shards when the members of a cluster change."""
