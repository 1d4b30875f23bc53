"""The wire protocol of server and clients: messages (a pure codec), ZMTP framing, and a blocking connection to a shard.

This package exports all of the codec, so that a new message is named in its own module only. Import everything else
from its module.
"""

# ruff: noqa: F403
from kvstore.wire.messages import *
from kvstore.wire.namespace import *
from kvstore.wire.status import *
from kvstore.wire.verbs import *
