"""Decide whether a failed operation on an object store is retried, and tell the user the way out.

The libraries below fsspec have different retries: the library for S3 gives up 2 seconds after a connection breaks. A
save after days of training must not be lost so soon, so every operation is retried for :data:`PATIENCE` seconds.
"""

from __future__ import annotations

import errno
import http.client
import random
import time
from collections.abc import Callable, Iterator

PATIENCE = 60.0
"""Seconds after the begin of an operation in which it is retried; the last try may take longer."""
PATIENCE_BEFORE_ANSWER = 5.0
"""The same in seconds for a store that never answered: its address may be wrong."""
FIRST_PAUSE, _MAX_PAUSE = 0.5, 8.0
"""Seconds before the second try, and maximum seconds before a later try."""
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken", "401"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "400", "403"}
"""400 and 403 can also mean expired credentials, if the answer has no body (HEAD)."""
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "429"}
_BROKEN = {"InternalError", "ServiceUnavailable", "RequestTimeout", "408", "500", "502", "503", "504"}
_ERRNOS = {
    errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH,
}  # fmt: skip
_CLASSES = {
    # of botocore, aiohttp, fsspec, requests and urllib3, which may not be installed
    "HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "ServerTimeoutError",
    "FSTimeoutError", "ChunkedEncodingError", "ProtocolError",
}  # fmt: skip


class Attempts:
    """The retries of one operation.

    Args:
        renew: reads the credentials again; returns False if the store has no credentials to renew.
        answered: the store has answered an earlier operation.
    """

    def __init__(self, renew: Callable[[], bool], answered: bool = True):
        self._renew = renew
        self._renewed = False
        self._answered = answered
        self._begin = time.monotonic()
        self._pause = FIRST_PAUSE

    def again(self, error: BaseException) -> bool:
        """Return True if the operation is to be retried, after a pause if the store needs one."""
        codes = _codes(error)
        if codes & (_EXPIRED | _DENIED) and not self._renewed:
            self._renewed = True
            return self._renew()
        answered = self._answered or codes & _THROTTLED
        patience = PATIENCE if answered else min(PATIENCE, PATIENCE_BEFORE_ANSWER)
        if not is_passing(error) or time.monotonic() + self._pause > self._begin + patience:
            return False
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        return True


def is_passing(error: BaseException) -> bool:
    """Return True for an error that may pass soon: throttling, a fault of the server, a broken connection."""
    codes = _codes(error)
    if codes & (_THROTTLED | _BROKEN):
        return True
    if codes or isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    return any(
        isinstance(one, (ConnectionError, TimeoutError, http.client.IncompleteRead))
        or (isinstance(one, OSError) and one.errno in _ERRNOS)
        or _is_of_connection(one)
        for one in _chain(error)
    )


def way_out(error: BaseException) -> str:
    """Return advice for the user about an error, "" if the error itself says enough."""
    codes = _codes(error)
    if codes & _EXPIRED:
        return "renew the credentials, then do it again"
    if codes & _DENIED or isinstance(error, PermissionError):
        return "renew the credentials if they have expired, or give them the permission, then do it again"
    if codes & _THROTTLED:
        return "let fewer processes use the store at a time, or do it again later"
    if is_passing(error):
        return "do it again when the store answers; the network to it, or the store itself, fails"
    return ""


def _codes(error: BaseException) -> set[str]:
    """Return the codes of an error and its causes: S3's name of the error, or the number of the HTTP status."""
    codes = set()
    for one in _chain(error):
        if _is_of_connection(one):
            break  # aiohttp sets a status on broken connections too
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code", "")))
        for name in ("status", "status_code", "code"):
            number = getattr(one, name, None)
            if isinstance(number, (int, str)):
                codes.add(str(number))
                break
    return codes - {""}


def _is_of_connection(error: BaseException) -> bool:
    return any(base.__name__ in _CLASSES for base in type(error).__mro__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
