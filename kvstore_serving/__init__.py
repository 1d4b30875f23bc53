"""Serving with several engines and one store: the load generator and the proxy. Needs the extra `serving`."""
