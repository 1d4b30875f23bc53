"""kvstore._cext: the code for which, by profile, Python is too slow, but for the index of blocks (`kvstore._index`).

``buffers.pxi``, ``arguments.pxi``: take and check the arguments of callers. ``hashing.pxi``: xxh3 checksums and
prefix hash chains. ``copying.pxi``: gather and scatter of blocks. ``sharing.pxi``: blocks between processes of one
host. ``reusable.pxi``: memory for what is read. ``sockets.pxi``, ``landing.pxi``, ``receiving.pxi``, ``sending.pxi``,
``streaming.pxi``: blocks from and to sockets. ``disk.pxi``: blocks to and from a segment file. ``placement.pxi``:
which shard owns a key. Every loop over block bytes runs with the GIL released.
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
