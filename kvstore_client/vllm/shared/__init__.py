"""What the connector and the tier have in common."""
