"""What this worker has imported, for the fork server of its node: the next workers find it imported already; and what
comes too late, because they do."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from elastic_harness.contract import variables
from elastic_harness.contract.messages import Imported
from elastic_harness.train.link import Link

READ_BY_TORCH = ("OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "TORCH_", "PYTORCH_")  # some of them when it is imported


def tell_imports(link: Link) -> None:
    """Tell the agent the names of all installed modules that are imported, if it wants to know. What lies elsewhere is
    the user's own: it may read the worker's rank or arguments when it is imported, so each worker imports it itself."""
    if os.environ.pop(variables.TELL_IMPORTS, None) is None:
        return
    paths = sysconfig.get_paths()
    installed = tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    names = [
        name
        for name, module in list(sys.modules.items())
        if name != "__main__" and str(getattr(module, "__file__", None) or "").startswith(installed)
    ]
    link.send(Imported(tuple(names)))


def late_settings() -> list[str]:
    """The environment variables for torch that this program has set, if it was forked from a process that had imported
    torch by then: they may have no effect."""
    then = {}
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, _, value = entry.partition(b"=")
        then[os.fsdecode(name)] = os.fsdecode(value)
    if "LOCAL_RANK" in then or "LOCAL_RANK" not in os.environ:
        return []  # not forked: what a forked worker is told is not in the environment that its process began with
    names = {name for name in {*os.environ, *then} if name.startswith(READ_BY_TORCH)}
    return sorted(name for name in names if os.environ.get(name) != then.get(name))
