"""The version of persia: read by the build, by the native module and by `persia.__version__`."""

__version__ = "0.1.0"
