"""What goes wrong because of where a run is: containers, schedulers, notebooks, stores. For docs/TROUBLESHOOTING.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Seen(NamedTuple):
    """What one sees in a place, why it is so, and what to do or type."""

    symptom: str
    cause: str
    next: str


PLACES: Mapping[str, Sequence[Seen]] = {
    "Containers": (
        Seen(
            "`Bus error`, or `unable to open shared memory object`, in a script with `DataLoader(num_workers=…)`",
            "Docker gives a container 64 MiB of /dev/shm. Snapshots of the harness do not lie there (they are memfds), "
            "but a data loader's workers hand their batches over in it.",
            "`docker run --shm-size=8g …`, or `--ipc=host`; `elastic-harness doctor` shows the size",
        ),
        Seen(
            "`docker stop` ends the run without a checkpoint",
            "The signal goes to process 1 of the container. A shell in that place does not pass it on.",
            '`CMD ["elastic-harness", "launch", …]` in brackets, or `exec elastic-harness launch …` in a script',
        ),
        Seen(
            "`memfd_create` fails",
            "A seccomp profile forbids it.",
            "`elastic-harness doctor`; allow `memfd_create` in the profile",
        ),
        Seen(
            "steps are many times as slow as on the bare machine",
            "torch starts a thread for each core of the machine, while the container has the time of a few.",
            "`training.threads=1` (or as many as a worker may use); `cat /sys/fs/cgroup/cpu.max` shows the quota",
        ),
        Seen(
            "a worker is killed by SIGKILL, and the incident cannot say whether memory ran out",
            "The counters of the control group cannot be read in this container.",
            "on the host: `dmesg -T | grep -i oom`; then more memory, or smaller micro-batches",
        ),
    ),
    "Kubernetes": (
        Seen(
            "the pod goes 30 s after its notice, in mid-save",
            "`terminationGracePeriodSeconds` is 30 s by default; on spot nodes it may be less (15 s on GKE).",
            "`launch --grace` below that time; see [preemption](health.md#preemption-and-drain)",
        ),
        Seen(
            "`Bus error` in data loaders, as above",
            "A pod has a /dev/shm of 64 MiB as well.",
            "mount an emptyDir with `medium: Memory` at /dev/shm; it counts against the pod's memory limit",
        ),
        Seen(
            "workers of two pods cannot connect",
            "A NetworkPolicy lets only named ports through, and workers listen at free ones.",
            "allow all TCP ports between the pods of the job; `elastic-harness doctor --peer POD_IP:PORT`",
        ),
        Seen(
            "a pod that comes back begins a new node folder",
            "Its host name, which names the node, has changed.",
            "give the node a name that stays: `--node-name`, for example the completion index of the Job",
        ),
    ),
    "Slurm": (
        Seen(
            "the time limit ends the job without a checkpoint",
            "Slurm sends SIGTERM only `KillWait` seconds before SIGKILL, and to job steps alone.",
            "`#SBATCH --signal=TERM@60`, and `launch --grace` below that time",
        ),
        Seen(
            "one failed node ends the whole job",
            "That is what `srun` and `sbatch` do unless they are told otherwise.",
            "`#SBATCH --no-kill` and `srun --no-kill --kill-on-bad-exit=0 elastic-harness launch …`",
        ),
        Seen(
            "`Address already in use` on a shared node",
            "Two jobs have chosen the same fixed port.",
            "give no fixed port: workers and agents take free ones; only etcd has one (`--listen`)",
        ),
        Seen(
            "processes are gone after the login session ends",
            "systemd ends what a user leaves behind (`KillUserProcesses`).",
            "start the run in the allocation (`sbatch`), not on the login node",
        ),
    ),
    "Colab and notebooks": (
        Seen(
            "the runtime was disconnected, and the run folder is gone",
            "The disk of a Colab runtime goes with it.",
            "mount Drive and give `--run-dir` a folder there, or set `checkpoint.s3_bucket`",
        ),
        Seen(
            "a cell that called `start()` cannot be run again",
            "The run still holds its folder.",
            "`run.close()`, or `with elastic_harness.start(…) as run:`; the next cell resumes",
        ),
        Seen(
            "`Cannot re-initialize CUDA in forked subprocess`",
            "Some cell used the GPU before workers were forked from this process.",
            "start workers with `launch`, which forks them from a process of its own; restart the kernel",
        ),
    ),
    "NCCL and gloo": (
        Seen(
            "`Connection refused`, or a wait for peers, while both machines are up",
            "The host name resolves to 127.0.1.1, or to a network that the others cannot reach.",
            "`launch --host ADDRESS`; `elastic-harness doctor` shows what the name resolves to",
        ),
        Seen(
            "NCCL hangs or fails at its start",
            "It has chosen a network interface that leads nowhere, such as docker0.",
            "`NCCL_SOCKET_IFNAME=eth0`; `NCCL_DEBUG=INFO` tells what it chose; or `training.backend=tcp`",
        ),
        Seen(
            "all ranks end with the same `Watchdog caught collective operation timeout`",
            "One rank did not come to the collective; the others only waited.",
            "`elastic-harness explain RUN` names the one that stands still; `hangs/` has the stacks of all",
        ),
        Seen(
            "gloo: `Connection closed by peer`",
            "The peer died. Its own log has the reason, not this one.",
            "`elastic-harness explain RUN`: the first cause comes first",
        ),
    ),
    "etcd": (
        Seen(
            "`etcdserver: mvcc: database space exceeded`",
            "Its database has reached its quota (2 GiB by default), mostly because nothing is compacted.",
            "`etcdctl compact REVISION`, `etcdctl defrag`, `etcdctl alarm disarm`; start it with "
            "`--auto-compaction-retention=1h`",
        ),
        Seen(
            "the store is away for seconds again and again; training goes on",
            "etcd syncs each write; on a slow or shared disk its leader loses its lease.",
            "`elastic-harness doctor --store URL` shows its latency; give etcd an SSD of its own",
        ),
        Seen(
            "a node is told that it belongs to another run",
            "The run id is used twice, or the folder is that of an older run.",
            "another `--run-id`; or `--fresh` on that node, which moves the folder aside",
        ),
    ),
    "Checkpoints": (
        Seen(
            "`No space left on device` while a checkpoint is saved; training goes on",
            "Checkpoints with AdamW take some 12 bytes for each parameter, and `checkpoint.keep_last` of them stay.",
            "free space: the next save goes through; `elastic-harness checkpoint prune --keep-last 2 RUN`",
        ),
        Seen(
            "the newest checkpoint is not the one that a resume begins from",
            "It is damaged, in doubt, or not whole; the newest one that can be proved is taken.",
            "`elastic-harness checkpoint ls RUN`, `elastic-harness checkpoint verify RUN`",
        ),
        Seen(
            "uploads fail with 403, or with a clock that differs",
            "The credentials do not cover the bucket, or this machine's clock is off by more than 15 minutes.",
            "`elastic-harness checkpoint push RUN s3://bucket/prefix` shows the error; set the clock (chronyd)",
        ),
    ),
}
