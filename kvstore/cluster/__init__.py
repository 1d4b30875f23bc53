"""The members of a cluster (from etcd or DNS) and the placement of keys on shards, for the server and the clients."""
