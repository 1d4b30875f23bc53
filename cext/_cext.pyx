"""kvstore._cext: the code for which profiles show that Python is too slow. The index is separate (`kvstore._index`).

``buffers.pxi``, ``arguments.pxi``: take and check the arguments of callers. ``hashing.pxi``: xxh3 checksums and prefix
hash chains. ``copying.pxi``: gather and scatter of blocks. ``sharing.pxi``: blocks between processes of one host.
``reusable.pxi``: memory for blocks that are read. ``sockets.pxi``, ``landing.pxi``, ``receiving.pxi``, ``sending.pxi``,
``streaming.pxi``: blocks from and to sockets. ``disk.pxi``: blocks to and from a segment file. ``placement.pxi``: which
shard owns a key. Every loop over the bytes of blocks runs with the GIL released.
"""
include "buffers.pxi"
include "arguments.pxi"
include "hashing.pxi"
include "copying.pxi"
include "sharing.pxi"
include "reusable.pxi"
include "sockets.pxi"
include "landing.pxi"
include "receiving.pxi"
include "sending.pxi"
include "streaming.pxi"
include "disk.pxi"
include "placement.pxi"
