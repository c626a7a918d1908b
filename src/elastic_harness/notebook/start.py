"""The call that starts a job from a notebook."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, launching
from elastic_harness.errors import ConfigError
from elastic_harness.notebook.job import NotebookJob
from elastic_harness.notebook.script import script_of
from elastic_harness.notebook.view import choose
from elastic_harness.runs import folder as folders
from elastic_harness.runs.named import RUNS

ENDING_S = 15.0  # after which a job that was told to stop has left its folder
_JOBS: weakref.WeakValueDictionary[Path, NotebookJob] = weakref.WeakValueDictionary()  # of this process, by folder


def launch(
    function: Callable[..., object] | str | Path | Sequence[str | Path],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str = 4,
    run_dir: str | Path | None = None,
    fresh: bool = False,
    wait: bool = True,
    view: bool = True,
    **options: object,
) -> NotebookJob:
    """Start workers that run a function of this notebook, or a script, and show them live in the cell.

    function: what each worker calls, with `args` and `kwargs`. It is defined at the top of a cell, as are the functions
    and classes that it uses; they reach the workers as source, written to a script in the run folder. Or a script's
    path, whose arguments are `args`; or a list of words as they stand behind `elastic-harness launch`. nproc: workers.
    run_dir: the run's folder, a new one below runs/ if it is left out; an existing one is resumed, or moved aside if
    `fresh`. options: others of `elastic-harness launch`, as spares=1.

    Returns when the job has ended. Interrupting the cell stops the job at a step's end, with the state saved, and
    raises KeyboardInterrupt; a second interrupt stops it at once. With wait=False the call returns at once, and the
    view goes on, with buttons to kill, add and stop: a kernel takes clicks only while no cell runs. The job never
    outlives this process. Raises ConfigError for what cannot be run, and JobFailed, with its exit code, if it fails.
    """
    path = Path(run_dir) if run_dir is not None else RUNS / folders.new_run_id()
    command = _command(function, args, kwargs, path)
    given = {"nproc_per_node": nproc, "run_dir": path, **options}
    arguments = launching.checked_arguments(command.words, given)
    _prepare(path, fresh=fresh)
    command.write()
    made = (lambda actions: choose({} if wait else actions)) if view else None
    job = _JOBS[path.absolute()] = NotebookJob(path, arguments, command.title, made)
    if wait:
        with job:
            job.wait()
    return job


class _Command:
    """The command line that workers run, and the script that has to be written for it."""

    def __init__(self, words: Sequence[str | Path], title: str, path: Path | None = None, text: str = "") -> None:
        self.words, self.title = words, title
        self._path, self._text = path, text

    def write(self) -> None:
        if self._path is not None:
            durable_file.write(self._path, self._text.encode())


def _command(
    function: Callable[..., object] | str | Path | Sequence[str | Path],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    run_dir: Path,
) -> _Command:
    """Return what is to be run. Raises ConfigError."""
    if callable(function):
        text = script_of(function, args, kwargs)
        path = run_dir / f"notebook_{function.__name__}.py"
        return _Command([path], f"{function.__name__}()", path, text)
    if kwargs:
        raise ConfigError(f"kwargs={dict(kwargs)} are for a function; a script has words: args=['--lr', '0.1']")
    words = [function] if isinstance(function, (str, Path)) else [*function]
    if not words:
        raise ConfigError("launch() was given an empty list; give a function, a script, or ['-m', 'module']")
    title = words[1] if str(words[0]) == "-m" and len(words) > 1 else Path(words[0]).name
    return _Command([*words, *map(str, args)], str(title))


def _prepare(path: Path, *, fresh: bool) -> None:
    """Make the run's folder, and move an earlier run aside if it is not to go on. Raises ConfigError while another job
    has the folder. One that is about to leave it, such as that of a kernel which was restarted, is waited for."""
    end = time.monotonic() + ENDING_S
    while folders.locked(path) and (folders.read_record(path) or {}).get("status") in ("stopping", "draining"):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    own = _JOBS.get(path.absolute())
    if folders.locked(path) or (own is not None and own.live):
        raise ConfigError(
            f"the run in {path} is live. Stop it with job.stop() or `elastic-harness stop {path}`, or choose another "
            "run_dir"
        )
    if fresh and (path / folders.RECORD).exists():
        folders.set_aside(path)
    (path / "logs").mkdir(parents=True, exist_ok=True)
