"""`kvstore-server`: the supervisor, its settings, its place in a cluster."""
