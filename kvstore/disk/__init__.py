"""The persistent tier: blocks in segment files, their index in LMDB behind a process of its own."""
