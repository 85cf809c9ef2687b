"""Takes secrets out of URLs before anything is printed, logged or stored: passwords, tokens, signatures."""

from __future__ import annotations

import re
from urllib.parse import unquote

_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<rest>[^\s'"<>]+)""")
_MASK = "***"
_SHORTEST = 4
"""Characters of the shortest value that is masked where it stands alone: a shorter one is in words by chance."""


def masked(text: str) -> str:
    """Return `text` with ``***`` for what stands before the ``@`` and after the ``?`` of each URL in it."""
    return _URL.sub(_masked_url, text) if "://" in text else text


def _masked_url(match: re.Match[str]) -> str:
    address, question, _ = match["rest"].partition("?")
    host, slash, path = address.partition("/")
    _, at, server = host.rpartition("@")
    return f"{match['scheme']}{_MASK + at if at else ''}{server}{slash}{path}{question}{_MASK if question else ''}"


def masked_as_in(text: str, url: str) -> str:
    """Return `text` masked, with ``***`` also for each secret of `url` that stands in it without its URL.

    Libraries below fsspec name a bucket, a user or a parameter of a query alone in their errors.

    Args:
        text: the text, such as an error's.
        url: the URL that it is about.
    """
    text = masked(text)
    for secret in sorted(_secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _secrets_of(url: str) -> set[str]:
    """Return what is secret in a URL: user and password, and the values of the query, as they stand and decoded."""
    match = _URL.search(url)
    if match is None:
        return set()
    address, _, query = match["rest"].partition("?")
    owner = address.partition("/")[0].rpartition("@")[0]
    values = [parameter.rpartition("=")[2] for parameter in query.split("&")]
    found = {owner, query, owner.partition(":")[2], *values}
    return {text for secret in found for text in (secret, unquote(secret)) if len(text) >= _SHORTEST}
