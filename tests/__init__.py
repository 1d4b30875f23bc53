import os

# numpy starts a thread for each core, which looks for work for a while. No test multiplies large matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
