"""Baselines: the speed of the machine and of transports, without a store."""
