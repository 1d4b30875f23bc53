"""The transports that come with kvstore: each module here is one, and its `sharing()` is what `plugins` finds."""
