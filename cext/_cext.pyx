"""kvstore._cext: the code for which, by profile, Python is too slow.

One extension module. ``arguments.pxi``: takes and checks the arguments of callers. ``hashing.pxi``: xxh3 checksums
and prefix hash chains. ``copying.pxi``: gather and scatter of blocks. ``sharing.pxi``: blocks between processes of one
host. ``reusable.pxi``: memory for what is read. ``sockets.pxi``, ``landing.pxi``, ``receiving.pxi``, ``sending.pxi``,
``streaming.pxi``: blocks from and to sockets. ``disk.pxi``: blocks to and from a segment file. ``placement.pxi``: which shard owns a key. ``index/``: a
namespace's index, key -> slot; ``policies/``: which blocks are evicted first. Every loop over block bytes runs with the
GIL released.
"""
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
include "index/records.pxi"
include "policies/policy.pxi"
include "index/links.pxi"
include "index/table.pxi"
include "index/blocks.pxi"
include "index/segments.pxi"
include "index/batch.pxi"
include "index/looking_up.pxi"
include "index/writing.pxi"
include "index/removing.pxi"
include "index/by_slot.pxi"
include "index/linking.pxi"
include "index/lifting.pxi"
include "index/index.pxi"
