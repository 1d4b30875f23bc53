"""Servers, clusters, disks and networks for the tests."""
