"""kvstore: a service that keeps the KV cache of LLM inference. This package contains the server, and the code that the
server and its clients share."""

__version__ = "0.1.0"
