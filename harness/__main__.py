"""``python3 -m harness``: the command line without an installation."""

from harness.cli import main

if __name__ == "__main__":
    main()
