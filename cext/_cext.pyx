"""kvstore._cext: what a profile says Python is too slow for.

One extension module, five ideas. ``hashing.pxi``: xxh3 checksums and prefix hash chains. ``copying.pxi``: gather and
scatter of blocks. ``disk.pxi``: blocks to and from a segment file. ``placement.pxi``: which shard owns a key. And a
namespace's index, key -> slot: what it is made of (``records.pxi``), who goes first under pressure (``policy.pxi``),
where blocks are (``table.pxi``, ``segments.pxi``), what callers hand in (``arguments.pxi``) and the class they use
(``slots.pxi``, ``index.pxi``). Every loop over block bytes runs with the GIL released.
"""
include "hashing.pxi"
include "copying.pxi"
include "disk.pxi"
include "placement.pxi"
include "records.pxi"
include "policy.pxi"
include "arguments.pxi"
include "table.pxi"
include "segments.pxi"
include "slots.pxi"
include "index.pxi"
