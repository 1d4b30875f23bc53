"""The persistent tier: blocks in segment files, and their index in LMDB, which a separate process owns."""
