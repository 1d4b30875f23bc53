"""Planning a fleet with disaggregated prefill/decode: closed forms, a simulator, and the search that uses both."""
