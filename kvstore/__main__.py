"""`python -m kvstore`: the server, as `kvstore-server`."""

from kvstore.cli import server_main

server_main()
