"""Decides whether a folder of the local file system may be trusted to hold what this process loads or executes.

Whoever can write into a folder, or rename one above it, can plant a file there. So the folder and all folders above it
must belong to this user or to root, and nobody else may write into them; a sticky folder such as ``/tmp`` is fine above
a folder of our own, since others cannot rename what is ours in it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def reason_not_to_trust(folder: Path) -> str | None:
    """Return why somebody else may have written what is in `folder`, None if nobody else can have.

    Args:
        folder: an existing folder, or a file in question.
    """
    if not hasattr(os, "geteuid"):
        return None
    # both ways to the folder: a link that others may replace leads anywhere
    checked: set[Path] = set()
    for path in (Path(os.path.abspath(folder)), folder.resolve()):
        for place in (path, *path.parents):
            if place in checked:
                continue
            checked.add(place)
            reason = _reason(place, is_above=place != path)
            if reason is not None:
                return reason
    return None


def _reason(place: Path, is_above: bool) -> str | None:
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode):
        # its permissions mean nothing: who may write into the folder that holds it decides
        return None if found.st_uid in _trusted_users() else f"{place} is a link of {_user(found.st_uid)}"
    if found.st_uid not in _trusted_users():
        return f"{place} belongs to {_user(found.st_uid)}"
    if is_above and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write into {place}"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"group {found.st_gid} may write into {place}"
    return None


def _trusted_users() -> tuple[int, int]:
    return (0, os.geteuid())


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _is_private_group(gid: int) -> bool:
    """Return True for root's group, and for a group of this user alone, as many systems make one for each user."""
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
