"""`python -m parverify` is the command `parverify`."""

from parverify.cli import main

if __name__ == "__main__":
    main()
