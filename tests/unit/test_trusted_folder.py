"""Which folders may hold what is loaded: those into which nobody else can have put it."""

from __future__ import annotations

import os

import pytest

from ort_zero.utils import trusted_folder
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


def test_a_folder_that_a_group_may_write_to_is_trusted_only_if_the_group_is_the_users_own(folder, monkeypatch):
    folder.chmod(0o775)
    monkeypatch.setattr(trusted_folder, "_is_private_group", lambda gid: False)
    assert reason_not_to_trust(folder) == f"group {folder.stat().st_gid} may write into {folder}"
    monkeypatch.setattr(trusted_folder, "_is_private_group", lambda gid: gid == folder.stat().st_gid)
    assert reason_not_to_trust(folder) is None


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
