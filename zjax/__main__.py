"""The `zjax` command as `python -m zjax`."""

from zjax.cli.main import run

if __name__ == "__main__":
    run()
