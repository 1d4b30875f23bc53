"""One shard's process: the event loop, its connections, and the handling of requests."""
