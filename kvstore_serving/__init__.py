"""Serving with engines around a store: the load generator and the proxy. Extra `serving` of the distribution."""
