"""The code that vLLM's connector and tier have in common."""
