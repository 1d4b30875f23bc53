"""Block memory: the arena, namespaces over it, and who gives way."""
