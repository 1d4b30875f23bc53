"""`python -m kvstore`: the server, as `kvstore-server`."""

from kvstore.node.cli import server_main

server_main()
