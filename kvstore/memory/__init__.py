"""The memory tier of a shard: arena, namespaces, eviction."""
