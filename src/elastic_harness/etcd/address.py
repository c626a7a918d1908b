"""Where an etcd is and how to log in: `etcd://host:2379,host:2379?user=NAME`,
`etcds://…?ca=FILE&cert=FILE&key=FILE`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from elastic_harness.contract import variables
from elastic_harness.errors import ConfigError

PORT = 2379
_OPTIONS = ("ca", "cert", "key", "user", "password_file")
_EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379"


@dataclass(frozen=True)
class Address:
    """Where an etcd is, and how to log in. The password is never shown."""

    endpoints: tuple[str, ...]  # URLs, any of which will do
    ca: str | None = None  # a file (PEM), as are cert and key
    cert: str | None = None
    key: str | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    @staticmethod
    def parse(text: str, environment: Mapping[str, str] = os.environ) -> Address:
        """Return the address that a user wrote. The password comes from ELASTIC_HARNESS_ETCD_PASSWORD or a file,
        because every user of a machine may read its command lines. Raises ConfigError."""
        url = urlsplit(text if "://" in text else f"etcd://{text}")
        secure = {"etcd": False, "http": False, "etcds": True, "https": True}.get(url.scheme)
        if secure is None:
            raise ConfigError(f"The store {text} begins with {url.scheme}://; etcd:// and etcds:// (TLS) are known.")
        if "@" in url.netloc:
            raise ConfigError(
                "The store's address holds a user or password, which any process on this machine could read; write "
                f"etcd://HOST:PORT?user=NAME, and put the password into {variables.ETCD_PASSWORD} or a password_file."
            )
        options = dict(parse_qsl(url.query, keep_blank_values=True))
        for name in options:
            if name not in _OPTIONS:
                raise ConfigError(f"The store's address has the option {name}; known are {', '.join(_OPTIONS)}.")
        endpoints = [_endpoint(host, secure, text) for host in url.netloc.split(",") if host]
        if not endpoints or url.path not in ("", "/"):
            raise ConfigError(f"The store {text} is no address such as {_EXAMPLE}.")
        if not secure and options.keys() & {"ca", "cert", "key"}:
            raise ConfigError("ca, cert and key are for TLS: begin the store's address with etcds://.")
        for name in ("ca", "cert", "key", "password_file"):
            if name in options and not Path(options[name]).is_file():
                raise ConfigError(f"The store's {name} is {options[name]}, which is no file.")
        password_file = options.pop("password_file", None)
        password = environment.get(variables.ETCD_PASSWORD, "")
        if password_file is not None:
            password = Path(password_file).read_text().strip()
        if options.get("user") and not password:
            raise ConfigError(
                f"The store's user is {options['user']}, but there is no password: set {variables.ETCD_PASSWORD}, or "
                "name a password_file."
            )
        return Address(tuple(endpoints), **options, password=password)


def _endpoint(host: str, secure: bool, text: str) -> str:
    url = urlsplit(f"//{host}")
    try:
        name, port = url.hostname, url.port or PORT
    except ValueError:
        raise ConfigError(f"The port in {host} is none; an address is such as {_EXAMPLE}.") from None
    if not name:
        raise ConfigError(f"The store {text} lacks a host; an address is such as {_EXAMPLE}.")
    shown = f"[{name}]" if ":" in name else name
    return f"{'https' if secure else 'http'}://{shown}:{port}"
