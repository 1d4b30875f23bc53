"""Helpers of the tests: servers, clusters, disks and networks."""
