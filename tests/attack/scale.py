"""The size of an attack: small in `make test`; as large as the documented limits in `make attack`."""

from __future__ import annotations

import os
from typing import Final

FULL: Final = os.environ.get("KVSTORE_ATTACK") == "full"
ATTACK_S: Final = 10.0 if FULL else 1.5  # the duration of each attack
# Limits of another client's PING, in the worst case and in the median. The short form runs on busy machines: it only
# distinguishes a shard that stops for a while from one that does not.
LONGEST_S: Final = 0.25 if FULL else 1.0
MEDIAN_S: Final = 0.005 if FULL else 0.05
BLOCKS: Final = 1_000_000 if FULL else 100_000  # the number of blocks in the attacked server
