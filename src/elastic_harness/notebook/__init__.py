"""Start training from a notebook cell, as Accelerate's `notebook_launcher` does it, with workers that may be killed.

    launch        start workers that run a function of the notebook, or a script, and show them live in the cell
    NotebookJob   what it returns: kill, scale, stop, wait, and what the run has recorded

The workers are processes of `elastic-harness launch`, so the run folder, the recovery and the proof are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_harness import lazy

if TYPE_CHECKING:
    from elastic_harness.notebook.job import JobFailed, NotebookJob
    from elastic_harness.notebook.start import launch

_HOMES = {
    "JobFailed": "elastic_harness.notebook.job",
    "NotebookJob": "elastic_harness.notebook.job",
    "launch": "elastic_harness.notebook.start",
}
__all__ = ["JobFailed", "NotebookJob", "launch"]

__getattr__, __dir__ = lazy.attach(__name__, _HOMES)
