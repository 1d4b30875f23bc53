"""How much an attack does: a little in `make test`, as much as the promises say in `make attack`."""

from __future__ import annotations

import os
from typing import Final

FULL: Final = os.environ.get("KVSTORE_ATTACK") == "full"
ATTACK_S: Final = 10.0 if FULL else 1.5  # each attack of time
# Another client's PING, at most and in the median. The short form runs on machines that do other things, too: it only
# tells a shard that stands still for a while from one that does not.
LONGEST_S: Final = 0.25 if FULL else 1.0
MEDIAN_S: Final = 0.005 if FULL else 0.05
BLOCKS: Final = 1_000_000 if FULL else 100_000  # in the server under attack
