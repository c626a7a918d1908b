"""Who may ask the page for what. Pure: headers go in, a refusal with its reason comes out.

- A browser that was led here by another site's name is refused by its Host header (DNS rebinding).
- With a token, a request has it as a cookie, or as `Authorization: Bearer TOKEN`.
- A command to the run needs, beside the token, a header of its own and the page's own origin. Another site's page can
  send neither.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Protocol
from urllib.parse import urlsplit

ASKED_BY_PAGE = "X-Elastic-Harness"
"""A header that a page of another origin cannot set without asking, and it is never allowed."""
BEARER = "Bearer "


class Headers(Protocol):
    """The headers of a request, whatever their case."""

    def get(self, name: str, default: str) -> str: ...


@dataclass(frozen=True)
class PageRefusal:
    """Why a request is not answered."""

    status: HTTPStatus
    reason: str


@dataclass(frozen=True)
class Access:
    """The rules of one server."""

    loopback: bool  # it listens on this machine only
    names: frozenset[str]  # of this machine, besides addresses, in lower case
    token: str | None  # None: none is asked for
    control: bool  # whether commands are taken

    def refusal(self, method: str, headers: Headers, port: int) -> PageRefusal | None:
        """Return why a request is refused, or None."""
        host = headers.get("Host", "")
        if not self._is_ours(host):
            return PageRefusal(
                HTTPStatus.FORBIDDEN,
                f"the Host header is {host[:100]!r}, which is no name of this machine; open the address that the "
                "command printed",
            )
        if self.token is not None and not self.knows_token(headers, port):
            return PageRefusal(
                HTTPStatus.UNAUTHORIZED,
                "a token is needed: open the address that the command printed, or send 'Authorization: Bearer TOKEN'",
            )
        return None if method == "GET" else self._refusal_of_command(headers, host)

    def _refusal_of_command(self, headers: Headers, host: str) -> PageRefusal | None:
        if not self.control or self.token is None:
            return PageRefusal(HTTPStatus.FORBIDDEN, "this page only shows; start it with --control to steer the run")
        origin = headers.get("Origin", "")
        if urlsplit(origin).netloc.lower() != host.lower():
            return PageRefusal(HTTPStatus.FORBIDDEN, f"the request comes from {origin[:100]!r}, which is not this page")
        if headers.get(ASKED_BY_PAGE, "") != "control":
            return PageRefusal(HTTPStatus.FORBIDDEN, f"the header {ASKED_BY_PAGE} is missing")
        if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return PageRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a command is a JSON object (application/json)")
        return None

    def knows_token(self, headers: Headers, port: int) -> bool:
        """Return whether a request has the token with it."""
        given = headers.get("Authorization", "")
        if given.startswith(BEARER) and self.is_token(given.removeprefix(BEARER).strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("Cookie", "")).get(cookie_name(port))
        except CookieError:
            return False
        return cookie is not None and self.is_token(cookie.value)

    def is_token(self, given: str) -> bool:
        """Return whether this is the token. It takes as long for any other text."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name == "localhost" or name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.loopback


def cookie_name(port: int) -> str:
    """Return the name of the token's cookie: browsers give cookies to all ports of a machine."""
    return f"elastic_harness_{port}"


def cookie(token: str, port: int) -> str:
    """Return the header that has a browser keep the token, for this page alone, until it is closed."""
    return f"{cookie_name(port)}={token}; HttpOnly; SameSite=Strict; Path=/"
