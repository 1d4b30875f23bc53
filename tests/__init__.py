import os

# By default, numpy starts a thread for each core, and these threads poll for work for a while. No test multiplies large
# matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
