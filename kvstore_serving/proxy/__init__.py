"""`kvstore proxy`: one OpenAI-compatible address for prefill and decode engines around a store."""
