"""kvstore._cext: what a profile says Python is too slow for.

One extension module, three ideas, a file each: ``hashing.pxi`` (xxh3 checksums and prefix hash chains),
``copying.pxi`` (gather and scatter of blocks), ``index.pxi`` (a namespace's key -> slot index with its LRU).
Every loop over bytes runs with the GIL released.
"""
include "hashing.pxi"
include "copying.pxi"
include "index.pxi"
