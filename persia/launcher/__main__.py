"""`python -m persia.launcher`."""

from persia.launcher import cli

if __name__ == "__main__":
    cli()
