"""Takes secrets out of URLs before anything is printed, logged or stored: passwords, tokens, signatures."""

from __future__ import annotations

import re

_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<rest>[^\s'"<>]+)""")
_MASK = "***"


def masked(text: str) -> str:
    """Return `text` with ``***`` for what stands before the ``@`` and after the ``?`` of each URL in it."""
    return _URL.sub(_masked_url, text) if "://" in text else text


def _masked_url(match: re.Match[str]) -> str:
    address, question, _ = match["rest"].partition("?")
    host, slash, path = address.partition("/")
    _, at, server = host.rpartition("@")
    return f"{match['scheme']}{_MASK + at if at else ''}{server}{slash}{path}{question}{_MASK if question else ''}"
