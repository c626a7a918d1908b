"""What this worker has imported, for the fork server of its node: the next workers find it imported already."""

from __future__ import annotations

import os
import sys
import sysconfig

from elastic_harness.train.link import Link

VARIABLE = "ELASTIC_HARNESS_TELL_IMPORTS"


def tell_imports(link: Link) -> None:
    """Tell the agent the names of all installed modules that are imported, if it wants to know. What lies elsewhere is
    the user's own: it may read the worker's rank or arguments when it is imported, so each worker imports it itself."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    paths = sysconfig.get_paths()
    installed = tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    names = [
        name
        for name, module in list(sys.modules.items())
        if name != "__main__" and str(getattr(module, "__file__", None) or "").startswith(installed)
    ]
    link.send("imports", modules=names)
