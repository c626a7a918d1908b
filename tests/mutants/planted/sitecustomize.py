"""Plants a mistake in one module of each process that Python starts with this folder in PYTHONPATH.

ELASTIC_PLANTED holds, as JSON, the name of the module, text that stands in its source exactly once, and what stands
there in its place. The source on disk stays as it is."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from types import CodeType
from typing import Any


class _Planted(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        old, new = PLANTED["old"], PLANTED["new"]
        if source.count(old) != 1:
            sys.exit(f"{old!r} stands {source.count(old)} times in {self.path}")
        return compile(source.replace(old, new), self.path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PLANTED["module"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Planted(name, spec.origin)
        return spec


PLANTED = json.loads(os.environ.get("ELASTIC_PLANTED") or "null")
if PLANTED:
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
