"""The errors of this distribution."""

from __future__ import annotations


class PersiaK8sError(RuntimeError):
    """Base of all errors raised here."""


class SpecError(PersiaK8sError, ValueError):
    """A PersiaJob that cannot be used; the message names field, value and remedy."""
