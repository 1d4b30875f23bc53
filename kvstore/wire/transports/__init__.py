"""The transports that come with kvstore. Each module here is one transport, and `plugins` finds its `sharing()`."""
