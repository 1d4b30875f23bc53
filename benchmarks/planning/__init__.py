"""Compares the planner with closed forms, with DistServe's published figures and with real engines."""
