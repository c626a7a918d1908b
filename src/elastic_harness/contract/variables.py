"""The names of the environment variables through which a job's processes, and its user, pass values on."""

from __future__ import annotations

# set by the agent for its workers
MEMBER = "ELASTIC_HARNESS_MEMBER"  # the worker's id; the writer of checkpoints has a name of its own here
RUN_DIR = "ELASTIC_HARNESS_RUN_DIR"
RUN_ID = "ELASTIC_HARNESS_RUN_ID"
LINK = "ELASTIC_HARNESS_FD"  # descriptor of the connection to the agent
BOARD = "ELASTIC_HARNESS_BOARD_FD"  # descriptor of the board, on which the worker shows what it does
SNAPSHOTS = "ELASTIC_HARNESS_SNAPSHOTS"  # descriptors of the shared memory, and of the eventfd that wakes the writer
TELL_IMPORTS = "ELASTIC_HARNESS_TELL_IMPORTS"  # set: the agent wants to know what the worker has imported

# set by a launcher for all that it starts
LAUNCHERS = "ELASTIC_HARNESS_LAUNCHERS"  # marks of the launchers around a process

# set by the user
HOST = "ELASTIC_HARNESS_HOST"  # the address of this machine at which its workers are reached
DASHBOARD_TOKEN = "ELASTIC_HARNESS_DASHBOARD_TOKEN"  # what the page of `elastic-harness dashboard` asks for
ETCD_PASSWORD = "ELASTIC_HARNESS_ETCD_PASSWORD"
METADATA = "ELASTIC_HARNESS_METADATA"  # HOST:PORT of a metadata service in place of the cloud's, for tests
FAILPOINTS = "ELASTIC_HARNESS_FAILPOINTS"  # where a process is to fail, for tests and chaos
FAULTS = "ELASTIC_HARNESS_FAULTS"  # the folder in which processes write down which of these faults happened to them
