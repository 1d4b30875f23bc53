"""The client's calls: how each public method becomes requests to shards, and their replies its result."""
