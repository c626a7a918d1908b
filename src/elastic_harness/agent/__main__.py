"""The agent process: started by `elastic-harness launch`, which restarts it if it dies by itself."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from elastic_harness.agent.control import commands
from elastic_harness.agent.elastic_run import ElasticRun
from elastic_harness.agent.loop import Agent, Supervisor
from elastic_harness.agent.options import LaunchOptions
from elastic_harness.agent.plain_run import PlainRun
from elastic_harness.agent.reporting.console import Console
from elastic_harness.contract import shared_frames
from elastic_harness.errors import HarnessError
from elastic_harness.runs.folder import RunFolder

EXIT_CRASHED = 70


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic_harness.agent", description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--parent", type=int, required=True, help="the process whose end ends the agent")
    parser.add_argument("--frames", required=True, help="descriptors of the shared memory for snapshots")
    parser.add_argument("--lock", type=int, required=True, help="the descriptor of the run folder's lock")
    parser.add_argument("--colour", action="store_true")
    given = parser.parse_args()

    output = os.dup(1)
    os.set_inheritable(output, False)
    try:
        folder = RunFolder(Path(given.run_dir))
        options = LaunchOptions.from_json(folder.record.get("options") or {})
    except HarnessError as error:
        print(f"[agent] error: {error}", flush=True)
        return error.exit_code
    console = Console(output, colour=given.colour, quiet=options.quiet)
    try:
        frames = shared_frames.from_text(given.frames)
        agent = Agent(folder, options, console, given.parent, frames, given.lock, commands.answer)
        elastic = options.store is not None or folder.record.get("mode") == "elastic"
        supervisor: Supervisor = ElasticRun(agent) if elastic else PlainRun(agent)
        return agent.run(supervisor)
    except HarnessError as error:
        console.notice(f"error: {error}")
        console.drain()
        return error.exit_code
    except Exception:
        (folder.logs / "agent.log").open("a").write(traceback.format_exc())
        console.notice(f"the agent crashed; its log is {folder.logs / 'agent.log'}")
        console.block(traceback.format_exc())
        console.drain()
        return EXIT_CRASHED


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed: to take the interpreter apart would only keep the launch waiting
