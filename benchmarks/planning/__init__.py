"""The planner against closed forms, against DistServe's published figures, and against real engines."""
