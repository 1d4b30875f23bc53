"""kvstore: the KV cache of LLM inference as a service. The server, and what both sides of the wire share."""

__version__ = "0.1.0"
