"""The client's calls. They turn each public method into requests to shards, and the shards' replies into its result."""
