"""The KV pipeline: a decode loop whose KV lives in part in a kvstore-server, read ahead of the layers that need it."""
