"""Mask passwords, tokens and signatures in URLs, and folders in paths, before text is printed, logged or stored."""

from __future__ import annotations

import re
from urllib.parse import unquote

_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<rest>[^\s'"<>]+)""")
_MASK = "***"
_MIN_SECRET_LENGTH = 4
"""Minimum length in characters of a secret that is masked outside of its URL: shorter secrets occur in common words."""


def masked(text: str) -> str:
    """Return `text` with ``***`` in place of the user before ``@`` and the query after ``?`` of each URL."""
    return _URL.sub(_masked_url, text) if "://" in text else text


def _masked_url(match: re.Match[str]) -> str:
    address, question, _ = match["rest"].partition("?")
    host, slash, path = address.partition("/")
    _, at, server = host.rpartition("@")
    return f"{match['scheme']}{_MASK + at if at else ''}{server}{slash}{path}{question}{_MASK if question else ''}"


def masked_as_in(text: str, url: str) -> str:
    """Return `text` masked, with ``***`` also for each secret of `url` that occurs outside of the URL.

    Errors of libraries below fsspec may quote a bucket, a user or a query parameter without the URL.
    """
    text = masked(text)
    for secret in sorted(_secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _secrets_of(url: str) -> set[str]:
    """Return the secrets of a URL (user, password, values of the query), as written and percent-decoded."""
    match = _URL.search(url)
    if match is None:
        return set()
    address, _, query = match["rest"].partition("?")
    owner = address.partition("/")[0].rpartition("@")[0]
    values = [parameter.rpartition("=")[2] for parameter in query.split("&")]
    secrets = {owner, query, owner.partition(":")[2], *values}
    return {text for secret in secrets for text in (secret, unquote(secret)) if len(text) >= _MIN_SECRET_LENGTH}


_PATH = re.compile(r"""(?<![\w.:/~-])(?:~|\.{1,2})?/(?:[^\s/'"<>,;:]+/)*(?P<name>[^\s/'"<>,;:]*)""")


def without_folders(text: str) -> str:
    """Return `text` with ``.../NAME`` in place of each path, so that it names no user and no folder."""
    return _PATH.sub(lambda match: f".../{match['name']}", text)
