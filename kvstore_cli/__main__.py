"""The command `kvstore`, and `python -m kvstore_cli`."""

import os


def main() -> None:
    """Run the command. It is a process of its own: numpy, which is imported next, is to start no thread for every core,
    which would spin for a while."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from kvstore_cli.main import main as command

    command()


if __name__ == "__main__":
    main()
