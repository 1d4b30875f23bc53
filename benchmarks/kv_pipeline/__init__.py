"""The KV pipeline: a decode loop whose KV lives in part in a kvstore-server, read ahead of the layers that need it."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported: the decoder has one core
