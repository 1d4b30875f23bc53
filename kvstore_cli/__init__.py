"""The `kvstore` command, for operators."""
