"""Decide whether this process may load or execute files from a folder of the local file system.

A user who can write into a folder, or rename a folder above it, can plant a file there. So all of them must belong to
this user or to root, and no other user may write into them, but into a sticky folder such as ``/tmp`` above.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def reason_not_to_trust(folder: Path) -> str | None:
    """Return why another user may have written into `folder`, None if no other user can have done so."""
    # check the path as written, too: other users may replace a link in it
    for path in (Path(os.path.abspath(folder)), folder.resolve()):
        for place in (path, *path.parents):
            if (reason := _reason(place, is_above=place != path)) is not None:
                return reason
    return None


def _reason(place: Path, is_above: bool) -> str | None:
    status = place.lstat()
    if stat.S_ISLNK(status.st_mode):
        # permissions of a link mean nothing: the permissions of the folder that contains it decide
        return None if status.st_uid in _trusted_users() else f"{place} is a link of {_user(status.st_uid)}"
    if status.st_uid not in _trusted_users():
        return f"{place} belongs to {_user(status.st_uid)}"
    if is_above and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write into {place}"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"group {status.st_gid} may write into {place}"
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
    """Return True for root's group, and for a group with this user as its only member, as many systems make."""
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
