"""What may fail between an object store and a process: whether another try helps, and what the user can do about it.

The libraries below fsspec try again by themselves, each as long as it likes: that of S3 gives up 2 seconds after a
connection was cut first. Days of training are worth more, so every operation is tried until :data:`PATIENCE` is over.
"""

from __future__ import annotations

import errno
import http.client
import random
import time
from collections.abc import Callable, Iterator

PATIENCE = 60.0
"""Seconds after its begin in which an operation that failed is begun again; it may take longer than that by itself."""
PATIENCE_WITH_STRANGERS = 5.0
"""The same for a store that has answered nothing yet: its address may be wrong."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
"""Seconds before the second try, and before any."""
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken", "401"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "400", "403"}
"""With 400 and 403 a store also says that credentials have expired, where its answer has no body (HEAD)."""
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "429"}
_BROKEN = {"InternalError", "ServiceUnavailable", "RequestTimeout", "408", "500", "502", "503", "504"}
_ERRNOS = {
    errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH,
}  # fmt: skip
_CLASSES = {
    # of botocore, aiohttp, fsspec, requests and urllib3, none of which need be installed
    "HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "ServerTimeoutError",
    "FSTimeoutError", "ChunkedEncodingError", "ProtocolError",
}  # fmt: skip


class Attempts:
    """Decides whether an operation that has failed is tried again; one for each operation.

    Args:
        renew: reads the credentials anew; returns False if the store has none that could be.
        known: the store has answered before.
    """

    def __init__(self, renew: Callable[[], bool], known: bool = True):
        self._renew = renew
        self._renewed = False
        self._known = known
        self._begin = time.monotonic()
        self._pause = _FIRST_PAUSE

    def again(self, error: BaseException) -> bool:
        """Return True if the operation shall be tried again, after a pause where the store needs one."""
        codes = _codes(error)
        if codes & (_EXPIRED | _DENIED) and not self._renewed:
            self._renewed = True
            return self._renew()
        known = self._known or codes & _THROTTLED
        patience = PATIENCE if known else min(PATIENCE, PATIENCE_WITH_STRANGERS)
        if not is_passing(error) or time.monotonic() + self._pause > self._begin + patience:
            return False
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True


def is_passing(error: BaseException) -> bool:
    """Return True for what may be over in a moment: throttling, a fault of the server, a connection that broke."""
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
    """Return a sentence about what to do, "" where the error says enough."""
    codes = _codes(error)
    if codes & _EXPIRED:
        return "renew the credentials, then do it again"
    if codes & _DENIED or isinstance(error, PermissionError):
        return "renew the credentials if they have expired, or have them allow it, then do it again"
    if codes & _THROTTLED:
        return "let fewer processes use the store at a time, or do it again later"
    if is_passing(error):
        return "do it again when the store answers; the network to it, or the store itself, fails"
    return ""


def _codes(error: BaseException) -> set[str]:
    """Return what a store or a server has said: S3's name of the error, or the number of the HTTP status."""
    found = set()
    for one in _chain(error):
        if _is_of_connection(one):
            break  # aiohttp gives what broke a number too
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            found.add(str(response.get("Error", {}).get("Code", "")))
        for name in ("status", "status_code", "code"):
            number = getattr(one, name, None)
            if isinstance(number, (int, str)):
                found.add(str(number))
                break
    return found - {""}


def _is_of_connection(error: BaseException) -> bool:
    return any(base.__name__ in _CLASSES for base in type(error).__mro__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
