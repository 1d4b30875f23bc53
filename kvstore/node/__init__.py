"""`kvstore-server`: the supervisor, its settings, its HTTP pages, and its membership in a cluster."""
