"""Block memory: the arena, the namespaces that share it, and the choice of blocks to evict."""
