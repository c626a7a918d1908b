"""The command `elastic-harness`: finds the subcommand, imports only that one, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from elastic_harness.errors import EXIT_CONFIG, EXIT_INTERRUPTED, HarnessError

COMMANDS = {
    "init": ("commands.init", "main", "write a small training project that runs"),
    "launch": ("commands.launch", "main", "start (or resume) a training job on this machine"),
    "ls": ("commands.manage", "ls", "list the runs"),
    "status": ("commands.manage", "status", "show a run: workers, generation, step, last recovery"),
    "dashboard": ("dashboard.command", "main", "a page that shows runs while they go on"),
    "top": ("dashboard.top", "main", "the same at a glance, in a terminal"),
    "logs": ("commands.manage", "logs", "show the output of a run's workers"),
    "stop": ("commands.manage", "stop", "stop a run at the next step boundary"),
    "resume": ("commands.manage", "resume", "launch a run again as it was launched before"),
    "scale": ("commands.manage", "scale", "change the number of workers of a live run"),
    "drain": ("commands.manage", "drain", "let a node of a live run go at a step boundary"),
    "audit": ("commands.manage", "audit", "compare all workers of a live run now, to the bit"),
    "kill": ("commands.manage", "kill", "kill a worker of a live run, to see it recover"),
    "rm": ("commands.rm", "main", "remove runs that ended, after asking"),
    "explain": ("commands.explain", "main", "tell what a code means, or the story of a run"),
    "report": ("commands.report", "main", "write what happened in a run as one HTML file"),
    "metrics": ("commands.metrics", "main", "show a run's metrics to Prometheus, or write them to a file"),
    "track": ("commands.track", "main", "show a run in TensorBoard, Weights & Biases, trackio or MLflow"),
    "verify": ("runs.verify", "main", "prove that every sample was used exactly once"),
    "replay": ("commands.replay", "main", "compute a recorded step again, and compare it to the bit"),
    "burn-in": ("commands.burn_in", "main", "test this machine: does it compute the same bits each time?"),
    "demo": ("demo", "main", "train a small language model while workers are killed"),
    "chaos": ("commands.chaos", "main", "break a job in known ways, and judge whether anything was lost"),
    "checkpoint": ("commands.checkpoint", "main", "list, check, compare, export or remove checkpoints"),
    "index": ("commands.index", "main", "build a token index from text, or look into one"),
    "simulate": ("commands.simulate", "main", "run the recovery protocol of many nodes under random faults"),
    "health": ("commands.health", "main", "which steps of a run would have stood out, by which rule"),
    "plan": ("commands.plan", "main", "what failures will cost, and how often to save"),
    "doctor": ("commands.doctor", "main", "check this machine before a run"),
    "etcd": ("etcd.server", "main", "start, show or stop an etcd for development"),
    "generate": ("gpt.generate", "main", "sample text from a trained run"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-harness",
        description="Training that survives killed workers, and ends on the very same weights.",
        epilog="elastic-harness COMMAND --help shows the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, _, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code. Never show a traceback for an error that we raise on purpose."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        module, function, _ = COMMANDS[arguments[0]]
        try:
            return int(getattr(importlib.import_module(f"elastic_harness.{module}"), function)(arguments[1:]) or 0)
        except HarnessError as error:
            print(f"elastic-harness {arguments[0]}: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            sys.stderr.close()
            return EXIT_INTERRUPTED
    if arguments and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"elastic-harness: there is no command {arguments[0]!r}; {hint}", file=sys.stderr)
        return EXIT_CONFIG
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.version:
        from elastic_harness import __version__

        print(__version__)
        return 0
    parser.print_help()
    return 0 if not arguments else 2


if __name__ == "__main__":
    sys.exit(main())
