"""The KV pipeline: a decode loop with part of its KV in a kvstore-server, read ahead of the layers that need it."""

import os
import sys

if "numpy" not in sys.modules:  # numpy reads it when it is imported; the decoder has one core
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
