"""One shard's process: the loop, its connections, what requests mean."""
