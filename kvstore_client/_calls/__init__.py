"""What a call of the client does."""
