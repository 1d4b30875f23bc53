"""Planning a fleet with prefill and decode apart: closed forms, a simulator, and the search that uses both."""
