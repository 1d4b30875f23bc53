"""The client's connections to shards, and its view of which shards there are."""
