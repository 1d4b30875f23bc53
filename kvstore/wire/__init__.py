"""The wire protocol of server and clients: messages (a pure codec), ZMTP framing, and a blocking connection to a shard.

This package exports the whole codec, so a new message needs to be named only in its own module. Import everything else
from the module that defines it.
"""

# ruff: noqa: F403
from kvstore.wire.messages import *
from kvstore.wire.namespace import *
from kvstore.wire.status import *
from kvstore.wire.verbs import *
