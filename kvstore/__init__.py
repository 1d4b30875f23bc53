"""kvstore: the KV cache of LLM inference as a service. The server, and the code that server and clients share."""

__version__ = "0.1.0"
