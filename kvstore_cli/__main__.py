"""Runs the command `kvstore`, also as `python -m kvstore_cli`."""

import os


def main() -> None:
    """Run the command. Before numpy is imported, limit it to one thread. Otherwise it would start a thread for every
    core, and these threads would spin for a while."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from kvstore_cli.main import main as command

    command()


if __name__ == "__main__":
    main()
