"""Connections to shards, and which shards there are."""
