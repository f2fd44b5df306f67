"""The `persia-launcher` command line: `cli` is its entry point, each subcommand a module of this package."""

from persia.launcher.command_line import cli

__all__ = ["cli"]
