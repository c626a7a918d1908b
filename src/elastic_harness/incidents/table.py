"""All codes. A code that was published keeps its number and its name for ever: a new kind gets a new number."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from elastic_harness.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_OTHER_BITS,
    EXIT_TERMINATED,
    EXIT_TOO_FEW_WORKERS,
    EXIT_USER_CODE,
)
from elastic_harness.incidents.code import Code

_GO_ON = "the others finish the same step without it, and its place is filled again"
_STORY = "see what happened before and after: `elastic-harness explain {run}`"
_LOG = "read the end of its log: `elastic-harness logs {run} {member} -n 40`"
_RESUME = "go on from the newest checkpoint: `elastic-harness resume {run}`"
_STACKS = "read the stacks of all workers in the folder `hangs/` of the run: the innermost lines say where it stands"
_BURN_IN = "test the machine: `elastic-harness burn-in --minutes 10`"

# ---- W: workers and agents that end

KILLED = Code(
    "EH-W101", "killed from outside", "unknown", "yes",
    symptom="a worker was killed by SIGKILL, and its log ends without an error",
    meaning="Somebody sent SIGKILL: an operator, a scheduler, or a kernel whose reasons cannot be read here.",
    evidence="its exit status is SIGKILL; the control group's out-of-memory counter did not rise, or cannot be read",
    inferred="nothing: SIGKILL alone does not say who sent it, so this is not called a lack of memory",
    done=_GO_ON,
    next=(
        "nothing, if it was you or your scheduler",
        "if it comes back, ask the kernel for its reasons: `dmesg -T | grep -i -e oom -e kill`",
        _STORY,
    ),
)  # fmt: skip
ASKED_TO_END = Code(
    "EH-W102", "ended by a polite signal", "unknown", "yes",
    symptom="a worker was killed by SIGTERM, SIGINT or SIGHUP, and nobody had asked the agent to stop",
    meaning="Somebody asked this one process to end, past its agent.",
    evidence="its exit status is SIGTERM, SIGINT or SIGHUP; the agent did not send it",
    inferred="nothing: the kernel does not record who sent a signal",
    done=_GO_ON,
    next=("to stop the whole run, ask its agent: `elastic-harness stop {run}`", _STORY),
)  # fmt: skip
CRASHED = Code(
    "EH-W103", "crashed in native code", "unknown", "unknown",
    symptom="a worker was killed by SIGSEGV, SIGBUS, SIGILL or SIGFPE",
    meaning="Native code did what the processor or the kernel does not allow: a library's bug, or bad memory.",
    evidence="its exit status is one of these signals",
    inferred="that it was its own doing; whether the library or the machine is at fault is not known",
    done=f"{_GO_ON}; a slot in which two workers crash ends the run",
    next=(
        "launch with PYTHONFAULTHANDLER=1: then the log shows the Python line",
        _LOG,
        f"if it is always the same machine: {_BURN_IN}",
    ),
)  # fmt: skip
ABORTED = Code(
    "EH-W104", "a library called abort()", "unknown", "unknown",
    symptom="a worker was killed by SIGABRT",
    meaning="A library of the process gave up on purpose. As a rule it said why on standard error.",
    evidence="its exit status is SIGABRT",
    inferred="that it was its own doing",
    done=f"{_GO_ON}; a slot in which two workers abort ends the run",
    next=(_LOG, "launch with PYTHONFAULTHANDLER=1: then the log shows the Python line"),
)  # fmt: skip
OTHER_SIGNAL = Code(
    "EH-W105", "ended by another signal", "unknown", "unknown",
    symptom="a worker was killed by a signal such as SIGXCPU, SIGPIPE or SIGUSR1",
    meaning="A limit of the system (`ulimit -a`), or a program that sends signals, ended it.",
    evidence="its exit status is that signal",
    inferred="nothing",
    done=_GO_ON,
    next=("compare the limits of the machine: `ulimit -a`", _LOG),
)  # fmt: skip
KILLED_ON_REQUEST = Code(
    "EH-W106", "killed on request", "infrastructure", "yes",
    symptom="a worker was killed by SIGKILL, and the incident says that `elastic-harness kill` asked for it",
    meaning="Somebody tried out how the run recovers.",
    evidence="the agent was asked on its control socket, and sent the signal itself",
    inferred="nothing",
    done=_GO_ON,
    next=("see how long the recovery took: `elastic-harness report {run}`",),
)  # fmt: skip
CHILD_KILLED = Code(
    "EH-W107", "its child was killed", "unknown", "yes",
    symptom="a worker ended with exit code 137 or 143",
    meaning="The worker is a shell or a wrapper. It says that the program that it had started was killed.",
    evidence="the exit code is 128 + SIGKILL or 128 + SIGTERM",
    inferred="that a shell made the exit code; a program could choose the same number",
    done=_GO_ON,
    next=("let the wrapper end with `exec program …`: then the agent sees the signal itself", _LOG),
)  # fmt: skip
MACHINE_FAILED = Code(
    "EH-W108", "the machine failed a worker", "infrastructure", "unknown",
    symptom="a worker ended with exit code 4, and the last line of its log is an `error:`",
    meaning="Disk, network, memory or a device failed, and the worker could not work around it.",
    evidence="the worker says so by its exit code; its message is in the log",
    inferred="nothing beyond its message",
    done="the worker is started again, unless it ends with the same error twice in a row; if all end so, the run ends",
    next=(_LOG, "check the machine: `elastic-harness doctor`", _RESUME),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
NOT_STARTED = Code(
    "EH-W109", "a worker could not be started", "infrastructure", "unknown",
    symptom="`cannot start a worker: …`",
    meaning="The operating system refused a new process: too many, too little memory, or no such program.",
    evidence="the error of the system call, in the event `worker_not_started`",
    inferred="nothing",
    done="it is tried again, later each time, up to --max-restarts",
    next=("compare the limits: `ulimit -u` (processes), `ulimit -n` (open files)", "`elastic-harness doctor`"),
)  # fmt: skip
GARBLED = Code(
    "EH-W110", "a worker sent nonsense", "workload", "no",
    symptom="worker … sent a wrong message, and was ended",
    meaning="What came over the worker's link is no message of ours: something else writes to it, or versions differ.",
    evidence="the bytes could not be read as a message; the incident has what was wrong",
    inferred="nothing",
    done=f"it was ended with SIGKILL, because nothing that it says counts any more; {_GO_ON}",
    next=(
        "use one version of elastic_harness everywhere",
        "let the script write nothing into descriptors that it has inherited, and keep them from its children",
    ),
)  # fmt: skip
CUT_OFF = Code(
    "EH-W111", "the run was cut off", "unknown", "yes",
    symptom="a run starts again, and its log has no `run_finished` of before",
    meaning="The agent, the launcher or the whole machine ended at once, and all workers of the node with them.",
    evidence="the newest event of the log, when this agent started, was not `run_finished`",
    inferred="that the agent before was killed, or its machine went down",
    done="the run goes on from the newest snapshot that its workers can read: in memory, on disk or in object storage",
    next=(
        "if it crashed by itself, its traceback is in logs/agent.log: `elastic-harness logs {run} agent`",
        "ask the kernel: `dmesg -T | grep -i -e oom -e kill`; and whether the machine was started again: `uptime`",
    ),
)  # fmt: skip

# ---- H: hangs

STANDS_STILL = Code(
    "EH-H101", "a worker stands still", "unknown", "yes",
    symptom="worker … hung: no progress for … s",
    meaning="A worker did nothing that it reports for longer than the deadline that it had set itself.",
    evidence="its board did not change within the deadline; who waits for whom leads to it, and no further",
    inferred="that it would not have gone on: a deadline is no proof",
    done=f"the stacks of all workers were taken, it was ended with SIGKILL, and {_GO_ON}",
    next=(
        _STACKS,
        "if such work is to be expected, raise elastic.progress_timeout_min_s",
        _LOG,
    ),
)  # fmt: skip
STOPPED = Code(
    "EH-H102", "a worker was stopped", "infrastructure", "yes",
    symptom="the process was stopped (SIGSTOP) for … s",
    meaning="Somebody stopped the process: a debugger's user, a scheduler, a job-control key in a terminal.",
    evidence="the kernel shows the process in state T",
    inferred="nothing; who sent SIGSTOP is not recorded",
    done=f"it was ended with SIGKILL after the deadline of a slot, at most 5 s, and {_GO_ON}",
    next=("to pause a run, stop it and resume it later: `elastic-harness stop {run}`", _STORY),
)  # fmt: skip
OVERDUE = Code(
    "EH-H103", "a piece of work took too long", "unknown", "yes",
    symptom="worker … was ended: slot … did not finish within … s",
    meaning="Reading data, computing a slot or applying an update took longer than any before it. Perhaps it was slow.",
    evidence="the same piece of work was on its board beyond the deadline, which comes from measured times",
    inferred="that it hangs; the next worker at this step has longer, so work that is only slow gets done",
    done=f"the stacks of all workers were taken, it was ended with SIGKILL, and {_GO_ON}",
    next=(
        "if such work is to be expected, raise elastic.progress_timeout_min_s",
        _STACKS,
        "compute the step again: `elastic-harness replay {run} --step {step}`",
    ),
)  # fmt: skip
DEADLOCK = Code(
    "EH-H104", "workers wait for each other", "unknown", "unknown",
    symptom="a deadlock, in the order in which they began to wait: …",
    meaning="Workers wait in a circle, so none of them can go on.",
    evidence="the waits that the workers show form a circle, and one of them is beyond its deadline",
    inferred="nothing",
    done=f"the stacks of all workers were taken, those beyond their deadline were ended, and {_GO_ON}",
    next=(
        _STACKS,
        "if your script has collectives of its own, call them in the same order on every worker",
    ),
)  # fmt: skip
WAITED_IN_VAIN = Code(
    "EH-H105", "a worker waited in vain", "unknown", "yes",
    symptom="worker … hung while it waited for another one",
    meaning="It did nothing wrong that is known: it waited for another worker until its own deadline was over.",
    evidence="its waits lead to another worker, which is slow, hangs, or is not known on this node",
    inferred="that the other one is the cause",
    done=f"it was ended with SIGKILL, and {_GO_ON}",
    next=("look for what befell the other worker: `elastic-harness explain {run}`", _STACKS),
)  # fmt: skip
NEVER_BEGAN = Code(
    "EH-H106", "a worker never called start()", "unknown", "unknown",
    symptom="it has not called elastic_harness.start() within … s of its start",
    meaning="The script hangs or works for long before it calls `elastic_harness.start()`, or never calls it.",
    evidence="no hello came within --join-timeout",
    inferred="that none would have come",
    done="it was ended with SIGKILL, and its place is filled again",
    next=(_LOG, "if the script needs longer to get there, raise --join-timeout"),
)  # fmt: skip
LINK_CLOSED = Code(
    "EH-H107", "a worker closed its link and lived on", "workload", "yes",
    symptom="it closed its link to the agent but did not end",
    meaning="The script closed a descriptor that it had inherited, or a thread keeps the dying process alive.",
    evidence="the link's end was seen, and the process ran 2 s later",
    inferred="nothing",
    done=f"it was ended with SIGKILL, and {_GO_ON}",
    next=(_LOG, "let the script close no descriptors that it did not open"),
)  # fmt: skip

# ---- M: memory

OUT_OF_MEMORY = Code(
    "EH-M101", "ended by the kernel for memory", "workload", "unknown",
    symptom="a worker was killed by SIGKILL, and the out-of-memory counter rose",
    meaning="The control group's memory was full, and the kernel ended a process in it.",
    evidence="its exit status is SIGKILL, and the control group's counter `oom_kill` rose at that moment",
    inferred="that the kernel's kill was this one, and not that of another process of the group in the same moment",
    done=f"{_GO_ON}; a slot in which a second worker ends so ends the run",
    next=(
        "use fewer workers on this machine, or smaller micro-batches (training.micro_batch_samples)",
        "raise the limit of the container or job",
        "see who held how much before: `elastic-harness explain {run}` has the alarms",
    ),
)  # fmt: skip
MEMORY_FILLS = Code(
    "EH-M102", "memory will be full soon", "workload", "unknown",
    symptom="alarm: memory … will be full in … s",
    meaning="Memory grows steadily. If it goes on so, it is full within 10 minutes.",
    evidence="the use of the pool over the last minutes, in the alarm's evidence",
    inferred="that the growth goes on",
    done="nothing: a trend is no proof",
    next=(
        "see which worker grows: the alarm's evidence has what each of them holds (`workers_bytes`)",
        "look for lists that grow with the steps: losses with their graph, caches, histories",
    ),
)  # fmt: skip
MEMORY_FULL = Code(
    "EH-M103", "memory is nearly full", "workload", "unknown",
    symptom="alarm: memory … is … full",
    meaning="Less than 5 % of a limit is left. The kernel may end a process next.",
    evidence="what the pool holds and its limit, in the alarm's evidence",
    inferred="nothing",
    done="nothing: it is told before the kernel acts",
    next=(
        "stop now and resume with less, while a checkpoint can be saved: `elastic-harness stop {run}`",
        "use fewer workers on this machine, or smaller micro-batches",
    ),
)  # fmt: skip

SLOT_RETRIED = Code(
    "EH-M104", "a slot ran out of memory, and was tried again", "workload", "unknown",
    symptom="memory ran out in slot … of step …; it is computed once more",
    meaning="An allocation failed while a micro-batch was computed. Free memory was given back, and it was repeated.",
    evidence="the error's words, and what the process and its limits held just then",
    inferred="nothing: if it succeeds, something else had held the memory",
    done="the slot is computed again by the same worker, with the same bits",
    next=(
        "if it happens often, use smaller micro-batches (training.micro_batch_samples), or fewer workers here",
        "look for what holds memory between slots: caches, lists of losses with their graph",
    ),
)  # fmt: skip
SLOT_DECLINED = Code(
    "EH-M105", "a slot was left to another worker for memory", "workload", "unknown",
    symptom="worker … leaves slot … of step … to another one",
    meaning="Memory ran out in the slot twice. Another worker may have more of it.",
    evidence="the error's words, twice; the slot's samples",
    inferred="that another worker may have the memory",
    done="another worker computes the slot, with the same bits, and nobody ends",
    next=(
        "compare how much memory the workers' machines have",
        "use smaller micro-batches (training.micro_batch_samples): a slot is never split",
    ),
)  # fmt: skip
NO_MEMORY = Code(
    "EH-M106", "a worker had no memory for a slot", "workload", "unknown",
    symptom="worker … failed: out of memory: …, or with an error such as MemoryError or torch.OutOfMemoryError",
    meaning="Memory ran out in a slot, and the error ended the worker. One that the script's own forward raises "
    "outside of `step.backward` does so at once. Any other came back in a second try, and the slot could not be left "
    "to another worker, or it was one of several in a row.",
    evidence="the kind of the error and its words, and the step and slot that were being read or computed",
    inferred="nothing: whether the slot or the worker is at fault shows when another worker computes the slot",
    done="it ended, and its place is filled again by one that begins with empty memory",
    next=(
        _LOG,
        "use fewer workers on this machine, or smaller micro-batches (training.micro_batch_samples)",
        "if the error is in the forward, give `step.backward` a function that computes the loss: it can be tried again",
    ),
)  # fmt: skip
SLOT_TOO_LARGE = Code(
    "EH-M107", "no worker has the memory for a slot", "workload", "no",
    symptom="the run failed: slot … of step … failed on … workers, each for memory",
    meaning="Every worker that there is ran out of memory in the same slot.",
    evidence="each worker's error or end in that slot; the slot's samples",
    inferred="that the slot takes more than a worker has",
    done="the run ended, with the samples named",
    next=(
        "look at the samples that the message names: is one much longer than the others?",
        "use smaller micro-batches, or machines with more memory, then `elastic-harness resume {run}`",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip

# ---- T: slow machines and waits

SLOW = Code(
    "EH-T101", "a worker is slower than the others", "unknown", "unknown",
    symptom="worker … takes … times as long for a slot as the median of the others",
    meaning="It has been so for many steps. It is dealt fewer lanes, but its machine does less than it is paid for.",
    evidence="how long a slot takes it and the others: reading, on a processor, waiting for one; what Linux counted",
    inferred="the cause, only where a counter shows it; otherwise it says that none does",
    done="lanes are dealt by speed; with health.on_slow=replace a spare takes its place",
    next=(
        "see all workers' paces: `elastic-harness status {run}`",
        "give the job another machine: `elastic-harness drain NODE`, or health.on_slow=replace with spares",
        _BURN_IN,
    ),
)  # fmt: skip
STEPS_SLOWER = Code(
    "EH-T102", "steps are slower than they were", "unknown", "unknown",
    symptom="alarm: steps take … s, … in the run's best hour",
    meaning="With as many members as then, and as many slots in a step, steps take half as long again or more.",
    evidence="the medians now and then, and what each worker here spends in reading and in waiting for a processor",
    inferred="nothing",
    done="nothing: a step that takes longer is no failure",
    next=(
        "see all workers' paces: `elastic-harness status {run}`",
        "look for other work on the machines, longer samples, and a slower disk or network",
    ),
)  # fmt: skip
DATA_SLOW = Code(
    "EH-T103", "steps wait for data", "workload", "unknown",
    symptom="alarm: workers spend …% of each step in reading samples",
    meaning="Reading and preparing the samples of a slot takes a large part of it, on the median worker.",
    evidence="the share of each step that is spent in the dataset",
    inferred="nothing",
    done="nothing",
    next=("let the dataset prepare less in each item, keep it on a faster disk, or read ahead in a thread of its own",),
)  # fmt: skip
DISK_SLOW = Code(
    "EH-T104", "the disk holds the agent up", "infrastructure", "unknown",
    symptom="alarm: writing the run's records took … s",
    meaning="The agent waited for the disk with the run's folder. Meanwhile it cannot watch over its workers.",
    evidence="how long the write took, and the folder",
    inferred="nothing",
    done="nothing",
    next=("keep the run's folder on a local disk, and checkpoints elsewhere: checkpoint.nvme_path",),
)  # fmt: skip
STORE_SLOW = Code(
    "EH-T105", "the store answers late", "infrastructure", "unknown",
    symptom="alarm: the store takes … s to renew this node's lease",
    meaning="If it takes longer than the lease, the others go on without this node.",
    evidence="how long the renewal took, and the lease",
    inferred="nothing",
    done="nothing",
    next=("look at the store's disk and at the network to it, or raise --node-timeout",),
)  # fmt: skip
CLOCK_SET = Code(
    "EH-T106", "the wall clock was set", "infrastructure", "unknown",
    symptom="alarm: the wall clock of this machine was set by … s",
    meaning="Times in the records before and after do not fit together. Deadlines do not depend on it.",
    evidence="the wall clock beside the monotonic one",
    inferred="nothing",
    done="nothing",
    next=("let a time service keep the clock, in small steps",),
)  # fmt: skip

# ---- N: bad numbers

NOT_FINITE = Code(
    "EH-N101", "an update that is not finite was skipped", "workload", "no",
    symptom="the update of step … was skipped: the loss of … slots is not finite",
    meaning="A loss or the summed gradient is NaN or infinite. Training again from the same state gives the same.",
    evidence="the headers of all members; other workers computed the slots again and got the same bits",
    inferred="that data or model is the cause, and no machine: other machines agree",
    done="weights, optimizer, buffers and moving average stay as they were; data and learning rate go on",
    next=(
        "look at the samples that the incident names",
        "compute the slot again: `elastic-harness replay {run} --step {step} --slot {slot}`",
        "to leave such slots out, or to go back before them, set health.on_nonfinite: skip_slot or rollback",
    ),
)  # fmt: skip
SLOTS_LEFT_OUT = Code(
    "EH-N102", "slots that are not finite were left out", "workload", "no",
    symptom="the update of step … was applied: the loss of … slots is not finite, and left out",
    meaning="Some slots' losses are NaN or infinite. The step is the mean of the others, as health.on_nonfinite asks.",
    evidence="the headers of all members, and their ledger lines",
    inferred="that data or model is the cause",
    done="the step was committed without these slots; `verify` counts them as read and left out",
    next=(
        "look at the samples that the incident names",
        "compute the slot again: `elastic-harness replay {run} --step {step} --slot {slot}`",
    ),
)  # fmt: skip
SPIKE = Code(
    "EH-N103", "a step stands out", "workload", "no",
    symptom="the update of step … was applied: its loss or norm is … σ above the median",
    meaning="Loss or gradient norm is far from that of the steps before. The update was applied as it is.",
    evidence="the recorded losses and norms of the last health.spike_window steps",
    inferred="that such a step may do harm",
    done="nothing but this word (health.on_spike: warn)",
    next=(
        "see which rule would have fired when: `elastic-harness health backtest {run}`",
        "compute the step again: `elastic-harness replay {run} --step {step}`",
    ),
)  # fmt: skip
SPIKE_SKIPPED = Code(
    "EH-N104", "a step that stands out was skipped", "workload", "no",
    symptom="the update of step … was skipped: its loss or norm is … σ above the median",
    meaning="Loss or gradient norm is far from that of the steps before, and health.on_spike is skip_step.",
    evidence="the recorded losses and norms of the last health.spike_window steps",
    inferred="that the update would have done harm",
    done="weights, optimizer, buffers and moving average stay as they were; data and learning rate go on",
    next=(
        "look at the data of this step: `elastic-harness replay {run} --step {step}`",
        "see which rule would have fired when: `elastic-harness health backtest {run}`",
    ),
)  # fmt: skip
SPIKE_SLOWED = Code(
    "EH-N105", "a lower learning rate after a spike", "workload", "no",
    symptom="the update of step … was applied with … times the learning rate",
    meaning="Loss or gradient norm is far from that of the steps before, and health.on_spike is lower_lr.",
    evidence="the recorded losses and norms of the last health.spike_window steps",
    inferred="that the full update would have done harm",
    done="the learning rate was lowered in this step; it comes back in a straight line",
    next=("see which rule would have fired when: `elastic-harness health backtest {run}`",),
)  # fmt: skip
WENT_BACK = Code(
    "EH-N106", "the run went back before bad numbers", "workload", "no",
    symptom="the run goes back to version … or before",
    meaning="A policy found a bad step and asked to go back and leave out the data around it.",
    evidence="the losses and norms on which all members agree; nobody committed the step",
    inferred="that the data around the step is the cause",
    done="all workers were started again from a checkpoint, and omit these steps or slots from now on",
    next=(
        "look at the data of the omitted steps, which the incident names",
        "a run with the same training.omit from its start ends with the same bits",
    ),
)  # fmt: skip
POLICY_HALTED = Code(
    "EH-N107", "a policy ended the run", "workload", "no",
    symptom="the run failed: the updates of … steps in a row were not finite",
    meaning="A rule for bad numbers, ours or your own, says that going on makes no sense.",
    evidence="the losses and norms on which all members agree; the reason has the figures",
    inferred="nothing: it is the rule that was set",
    done="all members stopped after the same step; checkpoints from before stay",
    next=(
        "look at the data and the learning rate",
        "go on from before: move the newer checkpoints out of the run's folder, then `elastic-harness resume {run}`",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
WENT_BACK_IN_VAIN = Code(
    "EH-N108", "going back did not help", "workload", "no",
    symptom="the run failed: … is omitted already",
    meaning="A policy wants to go back again to leave out what is left out already.",
    evidence="the omissions of this run, in run.json",
    inferred="that the data was not the cause",
    done="the run ended; the checkpoints stay",
    next=(
        "look at the model, the learning rate and the loss's scale, not at the data",
        "see the numbers: `elastic-harness health backtest {run}`",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
OWN_POLICY = Code(
    "EH-N109", "a policy of the script spoke", "workload", "no",
    symptom="the update of step … was applied, scaled or skipped: the words of your policy",
    meaning="A rule that was given as `policies=` did not simply apply the update.",
    evidence="what the policy says, in `decisions` of the step",
    inferred="nothing",
    done="what the policy asked for, alike on all members",
    next=("look at the step: `elastic-harness replay {run} --step {step}`",),
)  # fmt: skip

# ---- C: corruption

OTHER_BITS = Code(
    "EH-C101", "a worker computes other bits", "infrastructure", "no",
    symptom="worker … is not fit for this run: its canary, lanes, sum or state differ",
    meaning="The same work on the same state gave other bits than on its peers: bad memory, a bad core, another CPU.",
    evidence="hashes that members exchanged before the commit; a majority agrees, or one that was proved before",
    inferred="that the one who differs computes wrong; a script that is not deterministic looks the same",
    done="it was sent away, its place is given up, and the step was committed with the right bits",
    next=(
        _BURN_IN,
        "if it is no machine in particular, see docs/exactness.md for what breaks exactness",
    ),
)  # fmt: skip
IN_DOUBT = Code(
    "EH-C102", "committed steps are in doubt", "infrastructure", "yes",
    symptom="what the run did since version … is in doubt",
    meaning="A difference was found that may have come into the sums of earlier steps.",
    evidence="hashes that differ, and the version at which they were last equal",
    inferred="that any of the steps since then may be wrong",
    done="all workers were started again from a checkpoint of before, and the steps are computed again",
    next=(_BURN_IN, "compare all workers now: `elastic-harness audit {run}`"),
)  # fmt: skip
UNDECIDED = Code(
    "EH-C103", "nobody can say whose bits are right", "infrastructure", "unknown",
    symptom="members computed other bits, each the same again, and no majority says who is right",
    meaning="Two workers differ, each steadily. With a third one there would be a majority.",
    evidence="the same lanes, computed again on all workers",
    inferred="that one of the machines computes wrong",
    done="the run ended before the step was committed",
    next=(
        "on each machine: `elastic-harness burn-in --minutes 10`",
        "resume without the machine that fails it, or with a third worker: `elastic-harness resume {run}`",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
NOT_REPEATABLE = Code(
    "EH-C104", "bits that do not repeat", "unknown", "unknown",
    symptom="… of step … were computed again: no majority gave the same bits",
    meaning="The same lanes gave other bits on one and the same worker. Work that is random cannot be compared.",
    evidence="the same lanes, computed again on all workers, some twice",
    inferred="that the script is not deterministic, or a machine fails now and then",
    done="nobody is blamed; the policy decides about the step as if nothing had been computed again",
    next=(
        "compute the step again, twice: `elastic-harness replay {run} --step {step}`",
        "see docs/exactness.md for what breaks exactness",
        _BURN_IN,
    ),
)  # fmt: skip
WEIGHTS_DIFFER = Code(
    "EH-C105", "members finished with different weights", "infrastructure", "unknown",
    symptom="the run failed: the members finished with different weights",
    meaning="All steps were committed, and the hashes of the final weights are not equal.",
    evidence="the hash of each member, in the message",
    inferred="that one machine computes wrong, or the training code is not deterministic",
    done="the run ended as failed; the checkpoints stay",
    next=(
        _BURN_IN,
        "find the first step that differs: `elastic-harness replay {run} --step {step}`",
        "train with health.audit_interval, which finds it while it happens",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
STILL_IN_DOUBT = Code(
    "EH-C106", "in doubt again at the same place", "unknown", "no",
    symptom="the run failed: … It happened before, and going back did not help",
    meaning="The run went back for a difference, and the same steps differ again.",
    evidence="two doubts since the same version, with no step in between that goes beyond the first",
    inferred="that the script is not deterministic, or that several machines compute wrong",
    done="the run ended; the checkpoints stay",
    next=(
        "compute the step twice: `elastic-harness replay {run} --step {step}`",
        _BURN_IN,
        "see docs/exactness.md for what breaks exactness",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
NOTHING_BEFORE_DOUBT = Code(
    "EH-C107", "no checkpoint from before the doubt", "infrastructure", "no",
    symptom="the run failed: it is in doubt since version …, and no checkpoint from before is left",
    meaning="All checkpoints that are left may hold wrong bits.",
    evidence="the versions of the checkpoints, and the version since which the run is in doubt",
    inferred="nothing",
    done="the run ended rather than go on from wrong bits",
    next=(
        "begin anew with `--fresh`; the old folder is kept",
        "to have an older one next time, raise checkpoint.keep_last or checkpoint.keep_every",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
OTHER_BITS_AGAIN = Code(
    "EH-C108", "computed again, other bits", "unknown", "unknown",
    symptom="`replay`, `burn-in` or `audit` ended with exit code 5",
    meaning="What was recorded, or computed a moment ago, was computed again with other bits.",
    evidence="the hashes of both, in what the command says",
    inferred="nothing: another machine, library, number of threads, or a fault may be the cause",
    done="nothing to the run by `replay` and `burn-in`; after `audit` the run has gone back to before the difference",
    next=(
        _BURN_IN,
        "try a machine of the kind that trained it, with the same versions",
        "see docs/exactness.md for what breaks exactness",
    ),
    exit_code=EXIT_OTHER_BITS,
)  # fmt: skip
RULE_BROKEN = Code(
    "EH-C109", "a rule of the harness is broken", "unknown", "unknown",
    symptom="the run failed with an error that names two things which must be equal",
    meaning="Something is so that never can be: a bug of the harness, or memory that changed.",
    evidence="the check that failed, in the message",
    inferred="nothing",
    done="the run ended rather than train on wrong numbers",
    next=("report it with the run's events.jsonl and logs", _BURN_IN, _RESUME),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip

# ---- S: storage and checkpoints

NOT_SAVED = Code(
    "EH-S101", "a checkpoint could not be saved", "infrastructure", "unknown",
    symptom="checkpoint failed: …",
    meaning="The disk refused a checkpoint. Training goes on, and the older checkpoints stay.",
    evidence="the error of the system call",
    inferred="nothing",
    done="as checkpoint.async_save_policy says: it is told, or tried again for a while",
    next=("look for room: `df -h`", "see which checkpoints there are: `elastic-harness checkpoint ls {run}`"),
)  # fmt: skip
NOT_SAVED_FATAL = Code(
    "EH-S102", "the run ended for want of a checkpoint", "infrastructure", "unknown",
    symptom="the run failed: … (checkpoint.async_save_policy is fail)",
    meaning="A checkpoint could not be saved or uploaded, and the settings say that the run must not go on then.",
    evidence="the error of the system call or of the object storage",
    inferred="nothing",
    done="the run ended; the older checkpoints stay",
    next=("look for room and rights: `df -h`", _RESUME),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
CHECKPOINT_DAMAGED = Code(
    "EH-S103", "a damaged checkpoint was set aside", "infrastructure", "no",
    symptom="checkpoint corrupt: …",
    meaning="The bytes of a checkpoint or snapshot are not those that were written.",
    evidence="hashes in its manifest that do not match",
    inferred="that disk, memory or object storage changed them",
    done="it was renamed and is not used; an older one, or another tier, was taken",
    next=(
        "check all of them: `elastic-harness checkpoint verify {run}`",
        "check the disk and its messages: `dmesg -T | grep -i -e error`",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
CHECKPOINT_NOT_WHOLE = Code(
    "EH-S104", "a checkpoint that is not whole was passed over", "infrastructure", "no",
    symptom="checkpoint passed over: … is not whole",
    meaning="Something has the name of a checkpoint and lacks parts. An older checkpoint may have been taken.",
    evidence="what is missing, in the event",
    inferred="that it was copied in part, or that files were removed",
    done="it was left as it is, and not used",
    next=("see what is there: `elastic-harness checkpoint ls {run}`", "copy it again, whole, or remove it"),
)  # fmt: skip
CHECKPOINT_REPAIRED = Code(
    "EH-S105", "a checkpoint was repaired", "infrastructure", "yes",
    symptom="checkpoint repaired: …",
    meaning="Pieces of a checkpoint were damaged. Another tier had them whole.",
    evidence="hashes that did not match, and those of the pieces that took their place",
    inferred="that disk or memory changed them",
    done="the pieces were taken from another tier; what was loaded is whole",
    next=("check the disk and its messages: `dmesg -T | grep -i -e error`",),
)  # fmt: skip
NOT_UPLOADED = Code(
    "EH-S106", "an upload failed", "infrastructure", "yes",
    symptom="upload failed: …",
    meaning="A checkpoint is on disk, and could not be sent to object storage.",
    evidence="the answer of the object storage",
    inferred="nothing",
    done="as checkpoint.async_save_policy says: it is told, or tried again for a while",
    next=(
        "check access and network: `elastic-harness doctor`",
        "send it by hand: `elastic-harness checkpoint push {run} s3://BUCKET/PREFIX`",
    ),
)  # fmt: skip
WRITER_DIED = Code(
    "EH-S107", "the checkpoint writer died", "unknown", "yes",
    symptom="checkpoint writer died: the process that writes checkpoints …",
    meaning="The process that takes snapshots to disk ended. Training state is unharmed.",
    evidence="its exit code or signal",
    inferred="nothing",
    done="another one is started, and writes what is in memory",
    next=("read its log: `logs/checkpoint-writer.log` in the run's folder", "look for room: `df -h`"),
)  # fmt: skip
MEMORY_PASSED_OVER = Code(
    "EH-S108", "snapshots in memory were passed over", "infrastructure", "yes",
    symptom="memory passed over: …",
    meaning="The snapshots in the memory of the nodes do not make one whole state, so an older one was taken.",
    evidence="the shares that the ranks hold, in the event",
    inferred="that nodes were lost which held the missing shares",
    done="an older snapshot, or the next tier, was taken",
    next=("nothing, if nodes were lost; else raise peer_copies",),
)  # fmt: skip
NOT_COPIED = Code(
    "EH-S109", "copies on other nodes have ended", "infrastructure", "yes",
    symptom="peer copy failed: …",
    meaning="A snapshot could not be copied to the memory of another node. This node's own are whole.",
    evidence="the error of the exchange",
    inferred="that the peer is lost",
    done="nothing is copied until the next load_checkpoint",
    next=("look for what befell the other node; the next load_checkpoint begins anew",),
)  # fmt: skip
MEMORY_NOT_KEPT = Code(
    "EH-S110", "snapshots in memory end with the job", "infrastructure", "yes",
    symptom="keeper failed: the snapshots in memory end with this job",
    meaning="The process that was to keep the shared memory for the next job could not do so.",
    evidence="the error of the system call",
    inferred="nothing",
    done="the next job loads from disk or object storage",
    next=("see that a checkpoint is on disk: `elastic-harness checkpoint ls {run}`",),
)  # fmt: skip
LINES_DAMAGED = Code(
    "EH-S111", "damaged lines in log or ledger", "infrastructure", "no",
    symptom="… damaged lines were passed over",
    meaning="Lines in the middle of events.jsonl or ledger.jsonl are no JSON objects of ours.",
    evidence="the file and the byte at which the first one begins",
    inferred="that the disk, or somebody who edited the file, changed them",
    done="they were passed over: a resume needs neither the log nor every line of the ledger",
    next=("see what can still be proved: `elastic-harness verify {run}`",),
)  # fmt: skip
WEIGHTS_NOT_SAVED = Code(
    "EH-S112", "the trained weights could not be written", "infrastructure", "yes",
    symptom="the run failed after its last step: weights.safetensors could not be written",
    meaning="Training is done. The file with the weights, which all workers would write to the same place, failed.",
    evidence="the error of the system call",
    inferred="nothing",
    done="the run ended as failed; the last checkpoint has the weights",
    next=(
        "make room (`df -h`), then write it again without training: `elastic-harness resume {run}`",
        "or take the weights out of the checkpoint: `elastic-harness checkpoint export {run} weights.safetensors`",
    ),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip
AGENT_GAVE_UP = Code(
    "EH-S113", "the agent cannot go on", "infrastructure", "unknown",
    symptom="the run failed: cannot write …, or another message about the machine",
    meaning="The machine failed the agent: most often the disk of the run folder is full or gone.",
    evidence="the error of the system call, in the message",
    inferred="nothing",
    done="the run ended; everything that was committed before is in the ledger",
    next=("make room or repair the disk (`df -h`)", _RESUME),
    exit_code=EXIT_INFRASTRUCTURE,
)  # fmt: skip

# ---- P: preemption and requests to stop

PREEMPTED = Code(
    "EH-P101", "the cloud takes the machine back", "infrastructure", "yes",
    symptom="draining (aws, gcp or azure: …)",
    meaning="The metadata service of the cloud says that this machine will go.",
    evidence="the answer of the metadata service",
    inferred="nothing",
    done="its workers leave at a step boundary; if no other node goes on, a checkpoint is saved and the run stops",
    next=("give the same command on another machine: it joins the run",),
)  # fmt: skip
TOLD_TO_GO = Code(
    "EH-P102", "the node got SIGTERM", "infrastructure", "yes",
    symptom="draining (SIGTERM: asked to stop), or SIGTERM: stopping",
    meaning="A scheduler or a person asked this node's job to end.",
    evidence="the signal came to the launcher or the agent",
    inferred="nothing; who sent it is not recorded",
    done="its workers leave at a step boundary; if no other node goes on, a checkpoint is saved and the run stops",
    next=(_RESUME,),
)  # fmt: skip
DRAIN_ASKED = Code(
    "EH-P103", "the node was asked to go", "infrastructure", "yes",
    symptom="draining (request or file: …)",
    meaning="`elastic-harness drain` or the file of --notice-file asked this node to go.",
    evidence="the command on the control socket, or the file",
    inferred="nothing",
    done="its workers leave at a step boundary; if no other node goes on, a checkpoint is saved and the run stops",
    next=("give the same command again to let the node join again",),
)  # fmt: skip
DRAINED_LATE = Code(
    "EH-P104", "the machine went before a boundary came", "infrastructure", "yes",
    symptom="drained: its workers were ended at the deadline",
    meaning="The node's time was over before its workers reached a step boundary.",
    evidence="workers were running at the deadline",
    inferred="nothing",
    done="they were ended; the other nodes finish the same step without them",
    next=("if the notice comes late, let steps be shorter, or raise --grace up to what the machine is given",),
)  # fmt: skip
STOPPED_ON_REQUEST = Code(
    "EH-P105", "stopped on request", "infrastructure", "yes",
    symptom="exit code 143, 130 or 129, and `stopped: by …`",
    meaning="Ctrl-C, a signal or `elastic-harness stop` ended the run.",
    evidence="the signal to the launcher, or the command on the control socket",
    inferred="nothing",
    done="the workers saved a checkpoint at a step boundary and left",
    next=(_RESUME,),
    exit_code=EXIT_TERMINATED,
)  # fmt: skip

# ---- L: links, membership and the store

EXCHANGE_BROKE = Code(
    "EH-L101", "an exchange broke", "unknown", "yes",
    symptom="the event `exchange_broke`",
    meaning="A worker could not complete an exchange, and nobody had said why. Often a death is on its way.",
    evidence="the error of the connection, and for whom it was waiting",
    inferred="nothing: if a failure of that peer follows, that is the cause",
    done="a short wait for the news of a death, then a new generation; pairs that keep breaking are kept apart",
    next=("if no death follows, look at the network: `elastic-harness doctor`", _STORY),
)  # fmt: skip
UNREACHABLE = Code(
    "EH-L102", "two nodes cannot reach each other", "infrastructure", "unknown",
    symptom="node … cannot reach node … at …",
    meaning="No packet comes from the other node: a firewall, a cut, the wrong network, or its machine is gone.",
    evidence="what the kernel shows of the connection, at that address",
    inferred="nothing",
    done="the two are kept apart for a while; the larger part of the nodes goes on",
    next=(
        "try the way from this machine: `elastic-harness doctor --peer HOST:PORT`",
        "open the firewall between them, or choose the network with --host",
    ),
)  # fmt: skip
STORE_AWAY = Code(
    "EH-L103", "the store cannot be used", "infrastructure", "yes",
    symptom="the store cannot be used (…)",
    meaning="etcd does not answer. Training goes on; what happens to workers meanwhile waits.",
    evidence="the error of the requests",
    inferred="nothing",
    done="the requests are repeated until the store is back",
    next=("try it from this machine: `elastic-harness doctor --store etcd://HOST:2379`",),
)  # fmt: skip
STORE_DAMAGED = Code(
    "EH-L104", "a value in the store is not ours", "infrastructure", "unknown",
    symptom="the store's value … was not written by a node of this run",
    meaning="Somebody else writes under the keys of this run.",
    evidence="the key, and why its value is none of ours",
    inferred="that another program uses the same store and --run-id",
    done="it is ignored, and the node that owns it writes it anew",
    next=("give each job its own --run-id", "look who uses the store: `elastic-harness etcd status`"),
)  # fmt: skip
WAITING = Code(
    "EH-L105", "the run waits for workers", "unknown", "yes",
    symptom="waiting: … of … workers are ready",
    meaning="Fewer workers are there than --min-workers or --nnodes ask for. Those that are there keep their state.",
    evidence="the number of ready workers",
    inferred="nothing",
    done="nothing is trained until enough are there",
    next=(
        "see who is there: `elastic-harness status {run}`",
        "start the missing nodes; or launch with a smaller --min-workers",
    ),
)  # fmt: skip
TOO_FEW = Code(
    "EH-L106", "too few workers are left", "unknown", "unknown",
    symptom="the run failed: too few workers are left and none can be started again (exit code 3)",
    meaning="Places were given up one after the other, each for a reason that the log has.",
    evidence="the number of workers, and why each place was given up",
    inferred="nothing",
    done="those that were left saved what they had, if they could, and the run ended",
    next=(
        "see why each worker was given up: `elastic-harness explain {run}`",
        "remove that cause, then `elastic-harness resume {run}`",
        "if workers are to be killed often, raise --max-restarts",
    ),
    exit_code=EXIT_TOO_FEW_WORKERS,
)  # fmt: skip

PEERS_LOST = Code(
    "EH-L107", "workers of another node were lost", "unknown", "yes",
    symptom="generation …: … lost, and the event `peers_lost`",
    meaning="Workers of another node are no members any more: they died there, or the node or its network is gone.",
    evidence="the generation that all nodes agreed on is without them, and was urgent",
    inferred="nothing: what befell them is in the log of their own node, if that still exists",
    done="the others finish the same step without them; the node may join again",
    next=(
        "explain that node's own folder, on its machine: `elastic-harness explain {run}`",
        "see which nodes are there: `elastic-harness status {run}`",
    ),
)  # fmt: skip

# ---- U: user code and data

SCRIPT_FAILED = Code(
    "EH-U101", "the script raised an error", "workload", "no",
    symptom="worker … failed: SomeError: …",
    meaning="Code of the script, outside of the computing of a slot, raised an exception.",
    evidence="the exception, and its traceback in the log",
    inferred="nothing",
    done="the worker is started again; the same error twice in a row gives its place up",
    next=(_LOG, "fix the script, then `elastic-harness resume {run}`"),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
SLOT_FAILED = Code(
    "EH-U102", "the script raised an error in a slot", "workload", "no",
    symptom="worker … failed: SomeError: … while it computed a slot",
    meaning="Reading or computing one micro-batch raised an exception.",
    evidence="the exception, the step, the slot and its samples; the traceback in the log",
    inferred="nothing yet: whether the slot is at fault shows when another worker computes it",
    done="another worker computes the slot; if it fails there as well, the run ends",
    next=(
        _LOG,
        "compute the step again: `elastic-harness replay {run} --step {step}`",
    ),
)  # fmt: skip
POISON = Code(
    "EH-U103", "a slot fails wherever it is computed", "workload", "no",
    symptom="the run failed: slot … of step … failed on … workers",
    meaning="Several workers failed in the same slot of the same step: one of its samples, or the code on it.",
    evidence="two workers failed in it by themselves, or three were overdue in it",
    inferred="that the slot is the cause; kills from outside count only if there are very many",
    done="the run ended, before the slot had walked through every worker and spare",
    next=(
        "look at the samples that the message names",
        "fix the code or the data, then `elastic-harness resume {run}`",
        "or leave the slot out in a new run: training.omit: {step}/{slot}",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
EXITED = Code(
    "EH-U104", "the script ended with an exit code of its own", "workload", "no",
    symptom="worker … ended with exit code …",
    meaning="The process ended with an error code and told nobody of an exception.",
    evidence="its exit code, and the last lines of its log",
    inferred="that its own code chose it",
    done="the worker is started again; the same last line twice in a row gives its place up",
    next=(_LOG, "fix the script, then `elastic-harness resume {run}`"),
)  # fmt: skip
ENDED_EARLY = Code(
    "EH-U105", "the script ended before the last step", "workload", "no",
    symptom="worker … ended with exit code 0",
    meaning="The process ended without an error while steps were left: an early `exit`, or a loop that was left.",
    evidence="its exit code, and the steps that were left",
    inferred="nothing",
    done="the worker is started again; the second time its place is given up",
    next=('to end a run early call `run.stop("why")` and let the loop run on', _LOG),
)  # fmt: skip
LOOP_LEFT = Code(
    "EH-U106", "the script left the loop over the steps", "workload", "no",
    symptom="the run failed: the loop over run.steps() was left",
    meaning="`break` or `return` leaves one worker's loop. The others would wait for it.",
    evidence="the worker noticed it when its loop ended",
    inferred="nothing",
    done="the run ended; the newest checkpoint stays",
    next=('call `run.stop("why")` in place of `break`: all workers end after the same step', _RESUME),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
MEASURES_DIFFER = Code(
    "EH-U111", "workers say different things of one version", "workload", "no",
    symptom="the run failed: run.report() was given two values of …, or workers measure different things",
    meaning="What a validation has found must not depend on who computed it.",
    evidence="what each worker has told, before the step after that version",
    inferred="nothing",
    done="the run ended; the newest checkpoint stays",
    next=("let one worker report, or all the same value; `start(validation=…)` has one value for all", _RESUME),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
ALL_FAILED = Code(
    "EH-U107", "every worker failed in the script", "workload", "no",
    symptom="the run failed: every worker failed in user code, or in the same way, or before the first step",
    meaning="No place is left on which the script runs.",
    evidence="how the last worker at each place ended",
    inferred="that the script is the cause, because all places fail",
    done="the run ended; checkpoints, if any, stay",
    next=(
        "read the first error: `elastic-harness explain {run}`",
        "fix the script, then `elastic-harness resume {run}`",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
NOT_IMPORTED = Code(
    "EH-U108", "the script cannot be imported", "workload", "no",
    symptom="the script cannot be imported: …",
    meaning="A module that the script imports is missing, or has an error in its text.",
    evidence="the traceback in the log ends in an import",
    inferred="nothing",
    done="the run ended at once: another start would fail the same way",
    next=("install or correct what is named; use the Python in which it is installed", _LOG),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
OTHER_SAMPLES = Code(
    "EH-U109", "other samples under the same numbers", "workload", "no",
    symptom="ranks … read other samples under the same numbers",
    meaning="Two workers read the same sample numbers and got other bytes: augmentation by chance, or another copy.",
    evidence="the hash of the first micro-batch as it was read, from each of the workers",
    inferred="nothing",
    done="the worker that differs was sent away before anything was committed with it",
    next=(
        "let a sample depend on its number alone: seed the dataset's own generator from it",
        "compare the copies of the data on the machines",
    ),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip
FAILED_AFTER_TRAINING = Code(
    "EH-U110", "the code after training failed", "workload", "no",
    symptom="training finished, but the code after it failed in worker …",
    meaning="All steps are done and the weights are written. What the script did after that failed.",
    evidence="the last step was done before the process ended with an error",
    inferred="nothing",
    done="the run ended as failed; the trained weights are complete",
    next=(_LOG, "the weights are weights.safetensors in the run's folder"),
    exit_code=EXIT_USER_CODE,
)  # fmt: skip

# ---- R: settings

CONFIG_WRONG = Code(
    "EH-R101", "a setting is wrong", "workload", "no",
    symptom="exit code 2, and a message that names the setting, its value and what is allowed",
    meaning="The configuration or the command line cannot work.",
    evidence="the message",
    inferred="nothing",
    done="the worker is not started again: another start would fail the same way; if no other is left, the run ends",
    next=(_LOG, "correct the setting, then launch again with the same --run-dir"),
    exit_code=EXIT_CONFIG,
)  # fmt: skip
WORKER_REFUSED = Code(
    "EH-R102", "a worker does not fit the run", "workload", "no",
    symptom="this worker was refused: … the run has …, this process …",
    meaning="Its settings, its data, its machine or its versions would give other bits than the run has so far.",
    evidence="its fingerprint and that of the run",
    inferred="nothing",
    done="it was sent away before it could compute anything, and its place is given up",
    next=(
        "make what is named equal; or begin a new run with `--fresh` or another --run-dir",
        "to begin a new run with this one's state, use `--from {run}`",
    ),
)  # fmt: skip
NODE_REFUSED = Code(
    "EH-R103", "a node does not fit the run", "workload", "no",
    symptom="this node does not fit the run: …",
    meaning="The nodes of a run must have the same version, settings and data, and the same history.",
    evidence="what the nodes tell each other through the store",
    inferred="nothing",
    done="this node left; the others go on",
    next=("give all nodes the same version, configuration and data", "begin anew with `--fresh` on all nodes"),
    exit_code=EXIT_CONFIG,
)  # fmt: skip

TABLE: Mapping[str, Code] = MappingProxyType(
    {code.id: code for code in tuple(globals().values()) if isinstance(code, Code)}
)
"""All codes by their id, in the order of this file."""
