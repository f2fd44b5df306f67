"""A directory of checkpoints: one folder a step, the newest ones kept, `latest` naming the last whole one.

model/
  latest                 the name of a folder, replaced in one step after that folder's manifest
  step-000000010000/
  step-000000020000/
"""

from __future__ import annotations

import re

from persia.errors import CorruptionError, InvalidArgumentError, NotFoundError
from persia.logger import get_default_logger
from persia.storage.checksummed_json import encode_pointer, read_pointer
from persia.storage.location import Location
from persia.storage.manifest import MANIFEST_NAME

LATEST_NAME = "latest"
_VERSION = re.compile(r"step-(\d{12,20})")


def version_name(step: int) -> str:
    """The folder of step `step`; names sort like steps."""
    if step < 0:
        raise InvalidArgumentError(f"step={step} must not be negative")
    return f"step-{step:012d}"


def resolve(location: Location) -> Location:
    """The checkpoint itself: `location`, or the one that its `latest` names. NotFoundError: neither."""
    if (location / MANIFEST_NAME).exists_replaced():
        return location
    pointer = location / LATEST_NAME
    try:
        name = read_pointer(pointer)
    except NotFoundError as failure:
        raise NotFoundError(
            f"{location} is no checkpoint: it has neither {MANIFEST_NAME} nor {LATEST_NAME}. Check the path; "
            "an unfinished dump leaves neither"
        ) from failure
    # The name becomes a path: it must not lead out of the directory.
    if not _VERSION.fullmatch(name):
        raise CorruptionError(f"{pointer} says {name!r:.80}, not the name of a step's folder")
    # A person may have removed the folder, or copied `latest` without it.
    if not (location / name / MANIFEST_NAME).exists_replaced():
        known = ", ".join(version.name for version in _versions(location)) or "none"
        raise NotFoundError(f"{pointer} names {name}, which is no checkpoint; those there: {known}")
    return location / name


def checkpoints_at(location: Location) -> list[Location]:
    """The checkpoint at `location`, or all those of the directory; no promise that each is whole."""
    return [location] if (location / MANIFEST_NAME).exists_replaced() else _versions(location)


def latest_of(version: Location) -> Location:
    """The file that names one of the versions beside it."""
    return version.parent / LATEST_NAME


def is_latest(version: Location) -> bool:
    """Whether `latest` beside it names it."""
    try:
        return read_pointer(latest_of(version)) == version.name
    except (NotFoundError, CorruptionError):
        return False


def set_latest(root: Location, newest: str) -> None:
    """Lets loads of `root` find `newest`, which is complete."""
    (root / LATEST_NAME).replace(encode_pointer(newest))


def keep_newest(root: Location, newest: str, keep_last: int) -> None:
    """Removes all but the last `keep_last` checkpoints up to `newest`."""
    others = [version for version in _versions(root) if version.name != newest]
    # Steps above the newest belong to an abandoned run, which was resumed from an earlier step.
    others.sort(key=lambda version: _step_of(version) < _step_of(root / newest))
    for version in others[: len(others) - (keep_last - 1)] if len(others) >= keep_last else ():
        get_default_logger().info("removing the old checkpoint %s", version)
        (version / MANIFEST_NAME).remove()  # first: what is left of it is no checkpoint
        version.remove()


def _versions(root: Location) -> list[Location]:
    """Step folders, oldest first."""
    found = [child for child in root.children() if _VERSION.fullmatch(child.name)]
    return sorted(found, key=_step_of)


def _step_of(version: Location) -> int:
    return int(version.name.removeprefix("step-"))
