"""Who is in a cluster (etcd, DNS or a fixed list) and which shard holds a key; for the server and for clients."""
