"""The code that the connector and the tier share."""
