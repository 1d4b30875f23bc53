"""Moving blocks between shards when members change."""
