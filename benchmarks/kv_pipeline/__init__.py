"""The KV pipeline: a decode loop whose KV lives in part in a kvstore-server, read ahead of the layers that need it."""

import os
import sys

if "numpy" not in sys.modules:  # it is read when numpy is imported; the decoder has one core
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
