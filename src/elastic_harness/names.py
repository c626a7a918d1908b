"""One rule for all names that become a folder, a key in a store, or a part of a URL."""

from __future__ import annotations

import os
import re

from elastic_harness.errors import ConfigError

TRAINER = "elastic_harness.train"  # the module that trains the built-in model
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
RULE = "letters, digits, '.', '_' and '-', at most 101 of them, the first a letter or digit"


def check_name(what: str, name: str | None, why: str = "") -> str:
    """Return the name. Raises ConfigError if it breaks the rule, so that no name leads out of its own folder."""
    if name is None or not NAME.fullmatch(name):
        raise ConfigError(f"{what} is {name!r}; {why}it must be of {RULE}")
    return name


def integer_variable(name: str, default: int | None = None) -> int:
    """Return the number in an environment variable. Raises ConfigError if the text is no whole number."""
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is {text!r}; it must be a whole number, as a launcher sets it"
        ) from None
