"""The persistent tier: blocks in segment files, and their index in LMDB. A separate process owns the index."""
