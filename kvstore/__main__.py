"""`python -m kvstore` runs the server, like `kvstore-server`."""

from kvstore.node.cli import server_main

server_main()
