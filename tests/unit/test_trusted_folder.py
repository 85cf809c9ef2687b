"""Which folders may hold what is loaded: those into which nobody else can have put it."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ort_zero.utils.trusted_folder import reason_not_to_trust


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "above" / "cache"
    path.mkdir(parents=True)
    return path


def test_a_folder_of_our_own_is_trusted_below_a_sticky_one(folder):
    assert reason_not_to_trust(folder) is None
    folder.parent.chmod(0o1777)
    assert reason_not_to_trust(folder) is None


@pytest.mark.parametrize("which", ["cache", "above"])
def test_a_folder_that_others_may_write_to_is_not(folder, which):
    place = folder if which == "cache" else folder.parent
    place.chmod(0o777)
    assert reason_not_to_trust(folder) == f"everybody may write into {place}"


def is_alone_in_a_group_of_the_same_name(user: pwd.struct_passwd) -> bool:
    with suppress(KeyError):
        group = grp.getgrgid(user.pw_gid)
        return group.gr_name == user.pw_name and not group.gr_mem
    return False


@contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[None]:
    """Let this process act as another user, which only root may."""
    before = os.geteuid()
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("private", [True, False])
def test_a_folder_that_the_group_of_a_user_may_write_to_is_trusted_if_nobody_else_is_in_it(private):
    users = (user for user in pwd.getpwall() if user.pw_uid and user.pw_gid and os.geteuid() in (0, user.pw_uid))
    user = next((user for user in users if is_alone_in_a_group_of_the_same_name(user) is private), None)
    if user is None:
        pytest.skip("no such user on this system")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chown(folder, user.pw_uid, user.pw_gid)
        folder.chmod(0o775)
        with acting_as(user):
            reason = reason_not_to_trust(folder)
        if os.geteuid() == 0:
            os.chown(folder, -1, 0)
            with acting_as(user):
                assert reason_not_to_trust(folder) is None, "root may write everywhere"
    assert reason == (None if private else f"group {user.pw_gid} may write into {folder}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to any group")
def test_a_folder_that_a_group_may_write_to_is_trusted_by_root_if_it_is_roots(folder):
    folder.chmod(0o775)
    assert folder.stat().st_gid == 0 and reason_not_to_trust(folder) is None
    for gid in (1, 12345):
        os.chown(folder, -1, gid)
        assert reason_not_to_trust(folder) == f"group {gid} may write into {folder}"


def test_a_folder_that_a_shared_group_of_the_user_may_write_to_is_not(folder):
    groups = [gid for gid in os.getgroups() if gid not in (0, os.getegid())] or ([12345] if os.geteuid() == 0 else [])
    if not groups:
        pytest.skip("this user is in no second group")
    os.chown(folder, -1, groups[0])
    folder.chmod(0o775)
    assert reason_not_to_trust(folder) == f"group {groups[0]} may write into {folder}"


def test_a_sticky_folder_itself_is_not(folder):
    folder.chmod(0o1777)
    assert reason_not_to_trust(folder) == f"everybody may write into {folder}"


def test_a_folder_of_another_user_is_not(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert reason_not_to_trust(folder) == f"{folder} belongs to user 12345"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert "belongs to user" in (reason_not_to_trust(folder) or "")


def test_the_folder_that_a_link_leads_to_counts(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert reason_not_to_trust(link) is None
    folder.chmod(0o777)
    assert reason_not_to_trust(link) == f"everybody may write into {folder}"
