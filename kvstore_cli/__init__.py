"""The `kvstore` command, for operators: a process of its own, which no other code imports."""

import os

# Before numpy is imported, which would start a thread for every core, and have them spin for a while.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
