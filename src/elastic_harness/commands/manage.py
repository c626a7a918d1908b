"""Run management: `ls`, `status`, `logs`, `stop`, `resume`, `scale`, `drain`, `audit`, `kill`. RUN is a folder or an id
under runs/."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastic_harness import own_loop
from elastic_harness.agent.control.server import request
from elastic_harness.agent.decisions import store_view
from elastic_harness.contract.commands import AuditRun, DrainNode, GetStatus, KillWorker, ScaleRun, StopRun
from elastic_harness.errors import EXIT_CONFIG, EXIT_OTHER_BITS, EXIT_SUCCESS, ConfigError, InfrastructureError
from elastic_harness.incidents import table
from elastic_harness.names import TRAINER
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS, newest_events, passed_over
from elastic_harness.runs.named import RUNS
from elastic_harness.runs.summary import summary

_FOLLOW_S = 0.2


def ls(argv: Sequence[str]) -> int:
    """List the runs of a folder, newest first."""
    parser = _parser("ls", "List the runs, newest first.")
    parser.add_argument("folder", nargs="?", default=str(RUNS), help="where the runs are (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(list(argv))
    root = Path(given.folder)
    rows = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            record = folders.read_record(path)
        except InfrastructureError as error:
            record = {"status": "damaged"}
            print(f"elastic-harness ls: {error}", file=sys.stderr)
        if record is not None:
            rows.append(summary(path, record, "step_committed"))
    rows.sort(key=lambda r: -(r["created"] or 0))
    if given.json:
        for row in rows:
            print(json.dumps(row))
    elif not rows:
        print(f"no runs in {root}")
    else:
        print(f"{'RUN':<28} {'STATUS':<12} {'STEP':>6} {'LOSS':>9}  CREATED")
        for row in rows:
            loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
            step = "" if row["step"] is None else str(row["step"])
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"])) if row["created"] else ""
            print(f"{Path(row['run_dir']).name:<28} {row['status']:<12} {step:>6} {loss:>9}  {created}")
    return EXIT_SUCCESS


def status(argv: Sequence[str]) -> int:
    """Show one run, live or ended."""
    parser = _parser("status", "Show a run: workers, generation, step, loss, last recovery.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--store", metavar="URL", help="ask the store of a run of several nodes, from any machine")
    given = parser.parse_args(list(argv))
    if given.store is not None:
        shown = store_view.status(given.store, given.run)
        print(json.dumps(shown, indent=1)) if given.json else _print_nodes(shown)
        return EXIT_SUCCESS
    path = folders.resolve(given.run)
    record = folders.read_record(path) or {}
    shown = summary(path, record, "step_committed", "recovery", "incident")
    if shown["live"] and record.get("control"):
        shown = {**shown, **request(record["control"], GetStatus())}
    if given.json:
        print(json.dumps(shown, indent=1))
    else:
        _print_status(shown)
    return EXIT_SUCCESS


def logs(argv: Sequence[str]) -> int:
    """Print the workers' logs, or follow them."""
    parser = _parser("logs", "Show the output of a run's workers.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("worker", nargs="?", help="a member (w1-2), a place (w1 or 1), or agent; default: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as long as the run lives")
    parser.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N lines of each")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: log and line")
    given = parser.parse_args(list(argv))
    path = folders.resolve(given.run)
    positions: dict[Path, int] = {}
    while True:
        live = folders.locked(path)
        files = _log_files(path, given.worker)
        if not files and not (given.follow and live):
            names = ", ".join("-".join(f.stem.split("-")[-2:]) for f in _log_files(path, None))
            raise ConfigError(f"there is no log of worker {given.worker!r} in {path}; there are: {names or 'none'}")
        for file in files:
            position, goes_on = positions.get(file), given.follow and live
            if given.json:
                positions[file] = _print_as_json(file, position, given.lines, goes_on=goes_on)
            else:
                positions[file] = _print_from(file, position, given.lines, title=len(files) > 1)
        if not given.follow or not live:
            return EXIT_SUCCESS
        time.sleep(_FOLLOW_S)


def stop(argv: Sequence[str]) -> int:
    """Stop a live run, and return when it has ended."""
    parser = _parser("stop", "Stop a run at the next step boundary, saving a checkpoint.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for its end")
    _add_json(parser)
    given = parser.parse_args(list(argv))
    path = folders.resolve(given.run)
    request(folders.control_of(path), StopRun())
    end = time.monotonic() + given.timeout
    while folders.locked(path):
        if time.monotonic() > end:
            raise InfrastructureError(f"the run in {path} is still ending after {given.timeout:g} s; see its logs")
        time.sleep(0.02)
    words = f"stopped; resume with: elastic-harness resume {given.run}"
    return _say(given, words, {"stopped": str(path), "exit_code": (folders.read_record(path) or {}).get("exit_code")})


def resume(argv: Sequence[str]) -> int:
    """Launch a run again, with its command line and in the folder where it was launched."""
    parser = _parser("resume", "Launch a run again with the command line it was launched with.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="arguments that are added to the script's; of the built-in trainer settings that replace earlier ones. "
        "What changes the result (batch, model) is refused: `launch --from RUN` begins a new run with it",
    )
    given = parser.parse_args(list(argv))
    path = folders.resolve(given.run)
    record = folders.read_record(path) or {}
    if "argv" not in record:
        raise ConfigError(f"{path / folders.RECORD} has no command line; launch it with --run-dir {path}")
    from elastic_harness.agent.options import parse
    from elastic_harness.commands.launch import launch

    try:
        os.chdir(record["cwd"])
    except OSError as error:
        raise ConfigError(
            f"the run was launched in {record['cwd']}, which cannot be entered ({error.strerror}); launch it there "
            f"or from another folder with --run-dir {path}"
        ) from error
    argv = [*recorded_argv(record["argv"]), *given.overrides]
    again = replace(parse(argv), run_dir=str(path), run_id=record.get("run_id"), fresh=False, origin=None)
    code = launch(again, argv)
    if code == EXIT_CONFIG and given.overrides:  # they were refused: the next resume must not fail because of them
        folders.RunFolder(path).update(argv=record["argv"], options=record["options"])
    return code


def recorded_argv(argv: Sequence[str]) -> list[str]:
    """Return the command line that a run was launched with. The built-in trainer's settings stand where they belong
    now."""
    from elastic_harness.agent.options import parse

    trains = tuple(parse(argv).options.command[1:3]) == ("-m", TRAINER)
    return [own_loop.moved_override(word) if trains else word for word in argv]


def scale(argv: Sequence[str]) -> int:
    """Change the wanted number of workers of a live run."""
    parser = _parser("scale", "Change the number of workers of a live run; the others do not restart.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--workers", type=int, required=True, metavar="N")
    _add_json(parser)
    given = parser.parse_args(list(argv))
    path = folders.resolve(given.run)
    answer = request(folders.control_of(path), ScaleRun(given.workers))
    words = f"scaling to {answer['target']} workers (now {len(answer['members'])})"
    return _say(given, words, {"target": answer["target"], "members": answer["members"]})


def drain(argv: Sequence[str]) -> int:
    """Let one node of a live run go, and return when it is gone."""
    parser = _parser("drain", "Let a node leave at a step boundary. If no other node would go on, stop the run.")
    parser.add_argument("run", metavar="RUN", help="a run folder on this machine")
    parser.add_argument("node", nargs="?", help="the node, as `status --store` names it (default: the one of RUN)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for its end")
    _add_json(parser)
    given = parser.parse_args(list(argv))
    path = folders.resolve(given.run)
    node = "" if given.node is None else _node_named(path, given.node)
    request(folders.control_of(path), DrainNode(node))
    end = time.monotonic() + given.timeout
    while node in _nodes(path) if node else folders.locked(path):
        if time.monotonic() > end:
            raise InfrastructureError(
                f"the node is still there after {given.timeout:g} s; it leaves at the first step boundary after which "
                "enough workers go on (--min-workers, --nnodes), and trains until then; see its logs"
            )
        time.sleep(0.05)
    return _say(given, f"drained {node or 'this node'}", {"drained": node or str(path)})


def audit(argv: Sequence[str]) -> int:
    """Have all workers of a live run compared, and tell what was found."""
    parser = _parser(
        "audit",
        "Compare all workers of a live run, within one step: their whole state; every micro-batch, which another "
        "worker computes again; a block of each sum. It takes about as long as a step. A worker that differs is sent "
        f"away, as at any other time; the exit code is {EXIT_OTHER_BITS} then.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder on this machine")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="how long to wait for the answer")
    _add_json(parser)
    given = parser.parse_args(list(argv))
    path, began_at, number = folders.resolve(given.run), time.time(), time.time_ns() // 1000
    request(folders.control_of(path), AuditRun(number))
    end = time.monotonic() + given.timeout
    while (found := request(folders.control_of(path), GetStatus()).get("last_audit") or {}).get("number", 0) < number:
        if time.monotonic() > end:
            raise InfrastructureError(
                f"no step with the audit was committed within {given.timeout:g} s; see: elastic-harness status {path}"
            )
        time.sleep(0.05)
    since = takewhile(lambda event: event["t"] >= began_at, newest_events(path / EVENTS, lambda damage: None))
    differed = [event["reason"] for event in since if event["event"] == "rollback" and "omitted" not in event]
    code = table.OTHER_BITS_AGAIN.id if differed else None
    words = [f"differed: {reason}; the run went back to before that [{code}]" for reason in differed]
    words.append(
        f"version {found['version']}: {found['workers']} workers agree in all bits of their state ({found['state']}), "
        f"their micro-batches and sums ({found['took_s']:.1f} s)"
    )
    _say(given, "\n".join(words), {**found, "differed": differed, "code": code})
    return EXIT_OTHER_BITS if differed else EXIT_SUCCESS


def _nodes(path: Path) -> dict[str, Any]:
    """Return the nodes of a run, as its store knows them."""
    options = (folders.read_record(path) or {}).get("options") or {}
    if not options.get("store"):
        raise ConfigError(f"the run in {path} has one node; stop it with: elastic-harness stop {path}")
    nodes: dict[str, Any] = store_view.status(options["store"], options["store_id"])["nodes"]
    return nodes


def _node_named(path: Path, name: str) -> str:
    """Return the whole name of a node, from that or from its --node-name."""
    nodes = _nodes(path)
    found = [node for node in nodes if name in (node, node.rpartition("-")[0])]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} nodes are called {name!r}; there are: {', '.join(sorted(nodes)) or 'none'}")
    return found[0]


def kill(argv: Sequence[str]) -> int:
    """Kill one worker of a live run."""
    parser = _parser("kill", "SIGKILL a worker of a live run.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("worker", help="a member (w1-2), a place (w1) or a rank (rank0)")
    _add_json(parser)
    given = parser.parse_args(list(argv))
    answer = request(folders.control_of(folders.resolve(given.run)), KillWorker(given.worker))
    words = f"killed {answer['killed']} (rank {answer['rank']}, pid {answer['pid']})"
    return _say(given, words, {name: answer[name] for name in ("killed", "rank", "pid")})


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"elastic-harness {name}", description=description, allow_abbrev=False)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def _say(given: argparse.Namespace, words: str, fields: Mapping[str, Any]) -> int:
    """Print what was done, as it was asked for."""
    print(json.dumps(fields) if given.json else words)
    return EXIT_SUCCESS


def _print_nodes(shown: dict[str, Any]) -> None:
    print(f"run        {shown['run']}  {shown['store']}")
    print(f"status     {shown['status']}")
    if shown["generation"] is not None:
        forming = "" if shown["formed"] else ", forming"
        print(f"generation {shown['generation']}: {len(shown['members'])} workers{forming}; lineage {shown['lineage']}")
    if shown["waiting"]:
        print(f"           {shown['waiting']}")
    if shown["step"] is not None and shown["step"] >= 0:
        print(f"step       {shown['step']} ({shown['step_age_s']} s ago)")
    if shown["checkpoints"]:
        print(_checkpoints(shown["checkpoints"]))
    for name, row in sorted(shown["nodes"].items()):
        ranks = ", ".join(map(str, row["ranks"])) or "-"
        leads = ", leads" if name == shown["leader"] else ""
        leaves = ", draining" if row["draining"] else ""
        print(f"node       {name}: {row['ready']} of {row['places']} workers ready, ranks {ranks}{leads}{leaves}")


def _checkpoints(newest: Mapping[str, int]) -> str:
    return "checkpoint " + ", ".join(f"version {version} {what}" for what, version in newest.items())


def _print_status(shown: dict[str, Any]) -> None:
    exit_code = "" if shown.get("exit_code") is None else f" (exit code {shown['exit_code']})"
    print(f"run        {shown['run']}  {shown['run_dir']}")
    print(f"status     {shown['status']}{exit_code}")
    if shown.get("node"):
        print(f"node       {shown['node']}; {shown['leader'] or 'nobody'} leads")
    if shown.get("draining"):
        notice = shown["draining"]
        print(f"draining   for {notice['since_s']:.0f} s, {notice['source']}: {notice['why']}")
    if shown.get("store"):
        print(f"store      {shown['store']}")
    if shown.get("checkpoints"):
        print(_checkpoints(shown["checkpoints"]))
    if shown.get("generation") is not None:
        wanted = "" if shown.get("node") else f" of {shown['target']}"
        print(f"generation {shown['generation']}: {len(shown['members'])}{wanted} workers")
    if shown.get("waiting"):
        print(f"           {shown['waiting']}")
    if shown.get("step") is not None:
        loss = "" if shown["loss"] is None else f", loss {shown['loss']:.4f}"
        print(f"step       {shown['step']}{loss}")
    recovery = shown.get("last_recovery")
    if recovery:
        stages = ", ".join(f"{k} {v:.1f}" for k, v in recovery.get("stages", {}).items())
        print(f"recovery   {recovery.get('total_ms', 0):.1f} ms at generation {recovery.get('generation')} ({stages})")
    if shown.get("damaged"):
        print(f"log        {passed_over(shown['damaged'])}")
    if shown.get("last_incident"):
        code = f"{shown['last_incident_code']} " if shown.get("last_incident_code") else ""
        print(f"incident   {code}{shown['last_incident']}")
    for worker in shown.get("workers", []):
        rank = "-" if worker["rank"] is None else worker["rank"]
        state, pace = worker["leaving"] or worker["state"], _pace(worker.get("pace"))
        print(f"worker     {worker['member']:<8} rank {rank:<3} pid {worker['pid']:<8} {pace:<44} {state}")


def _pace(pace: Mapping[str, Any] | None) -> str:
    """Return how fast a worker was in its last step, in words."""
    if pace is None:
        return ""
    slow = "  slow" if pace["slow"] else ""
    return f"step {pace['step_s']:.3g} s, lane {1e3 * pace['lane_s']:.3g} ms, {pace['reading']:.0%} reading{slow}"


def _log_files(path: Path, worker: str | None) -> list[Path]:
    folder = path / "logs"
    if worker is None:
        return sorted(folder.glob("*.log"), key=lambda f: (f.stat().st_ctime, f.name))
    if worker == "agent":
        return list(folder.glob("agent.log"))
    place = worker.removeprefix("w")
    begin, end = (f"worker-{place}-", ".log") if place.isdigit() else ("worker-", f"-{worker}.log")
    found = [f for f in folder.glob("worker-*.log") if f.name.startswith(begin) and f.name.endswith(end)]
    return sorted(found, key=lambda f: (f.stat().st_mtime, f.name))


def _print_from(file: Path, position: int | None, lines: int, *, title: bool) -> int:
    """Print what was added since `position`, and return the new position."""
    data = _added(file, position)
    if title and (data or position is None):
        print(f"==> {file.name} <==")
    sys.stdout.flush()
    sys.stdout.buffer.write(_last(data, lines) if position is None else data)
    sys.stdout.buffer.flush()
    return (position or 0) + len(data)


def _print_as_json(file: Path, position: int | None, lines: int, *, goes_on: bool) -> int:
    """Print each added line as an object, and return the new position. While the log goes on, a line that is not whole
    comes next time."""
    data = _added(file, position)
    data = data[: data.rfind(b"\n") + 1] if goes_on else data
    for line in (_last(data, lines) if position is None else data).splitlines():
        print(json.dumps({"log": file.name, "line": line.decode(errors="replace")}))
    sys.stdout.flush()
    return (position or 0) + len(data)


def _added(file: Path, position: int | None) -> bytes:
    with open(file, "rb") as source:
        source.seek(position or 0)
        return source.read()


def _last(data: bytes, lines: int) -> bytes:
    return b"".join(data.splitlines(keepends=True)[-lines:]) if lines else data
