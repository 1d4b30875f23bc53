"""`python -m kvstore_cli`: the command, as `kvstore`."""

from kvstore_cli.main import main

main()
