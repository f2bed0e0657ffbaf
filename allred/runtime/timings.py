"""All times and limits of failure handling. The assertions are the orders between them that the protocols need.

A name has one meaning. `_S` is in seconds; `_BYTES` and `_CHARS` limit messages.
"""

# Channels (channel.py) and background processes (detached.py).

AUTHENTICATE_S = 5.0  # from the connection to the first message of the connecting end
SEND_S = 3.0  # a send to a peer that does not read; then the connection is closed
RETRY_S = 0.1  # between two attempts: to connect, to listen at a used address, to kill all processes of a job
UNAUTHENTICATED_PEERS = 128  # connections that are not authenticated yet; one more closes the oldest
UNAUTHENTICATED_BYTES = 2**12  # the longest line before authentication
LINE_BYTES = 2**20  # the longest line after authentication
SNAPSHOT_BYTES = 2**26  # the longest snapshot of a job: about 370 bytes for each rank
RECEIVE_BYTES = 2**16  # of one read
KEEPALIVE_S = 20, 10  # a peer's machine without power or network is noticed after 20 + 4 * 10 s
CHIEF_KEEPALIVE_S = 10, 5  # the same at `allred run`, for the chief's host: 10 + 4 * 5 s
KEEPALIVE_COUNT = 4
DETACHED_START_S = 20.0  # for a background process to answer

# Ranks and their watcher. An event is one message of SOCK_SEQPACKET.

EVENT_BYTES = 2**17  # of a message between a rank and its watcher; Linux takes no more than 208 KiB
JSON_BYTES = 12  # that a character takes at most in JSON
VERDICT_CHARS = 9000  # the longest verdict, and the end of a traceback
UNSENT_COUNT = 1000  # events that a rank keeps while its watcher does not read
WORDS_CHARS = 500  # an operation, or the last line of a traceback
ROLE_CHARS = 200  # the text of `set_role`
STACKS_CHARS = 2**16  # of the stacks of all ranks of a node
POLL_S = 0.005  # of a wait for a counter: the signal handler may read the answer just before the wait polls
HELLO_S = 3.0  # for the first message of a rank that has connected
WELCOME_S = 10.0  # for the watcher to accept a rank
FIRST_RANK_S = 60.0  # for the first rank to connect; else the watcher ends
LEAST_MPI_INIT_S = 60.0  # of MPI_Init: ALLRED_TIMEOUT_S may be shorter than the start of many hosts
WATCHER_TICK_S = 0.05  # the longest interval between two looks at the state of the job
IDLE_TICK_S = 0.5  # the same, once no rank has sent an event for IDLE_S
IDLE_S = 15.0
STACK_S = 0.5  # for ranks to write their stacks
STACK_END_S = 0.05  # after the last piece of a stack with all threads, whose end has no mark
SAMPLE_PERIOD_S = 0.25  # of the counters, while a monitor is connected
SNAPSHOT_S = 10.0  # for the chief's watcher to answer a monitor
HEARTBEAT_PERIOD_S = 0.5
SILENT_HOST_S = 5.0  # without a heartbeat, until a message names the host
LEAST_LOST_HOST_S = 2 * SILENT_HOST_S  # a silent host is lost no sooner, even if ALLRED_TIMEOUT_S is shorter

assert JSON_BYTES * (VERDICT_CHARS + 2 * (WORDS_CHARS + ROLE_CHARS)) < EVENT_BYTES, "a verdict has its first line twice"
assert JSON_BYTES * STACKS_CHARS < LINE_BYTES - EVENT_BYTES, "a message between watchers has the states, too"
assert STACK_END_S < STACK_S
assert WELCOME_S > HELLO_S, "a rank waits while the watcher waits for the hello of another"
assert WATCHER_TICK_S < HEARTBEAT_PERIOD_S < SILENT_HOST_S

# Long waits.

REPORT_WAIT_S = 1.0  # a shorter wait is not reported to the watcher
QUERY_S = 1.0  # for the watchers of other nodes to send the states or counters of their ranks
LIMIT_VERDICT_S = 2.0  # for the watcher's answer to a wait that has reached its time limit
AFTER_BUSY_S = 2.0  # no time limit ends the job this soon after a rank was busy: its failure may follow and comes first
RECHECK_S = 0.5  # the shortest extension of such a wait
LEFT_RANK_S = 2.0  # a wait for a rank that has left is no failure before: it may have answered just before it left
LOST_CONNECTION_S = 2.0  # without progress, until a lost connection is an error: the watcher may report its cause
LAST_MESSAGE_S = 2.0  # for messages to a rank that may be dead, at the end of mode ps or of a client
SILENT_WORKER_S = 1.0  # without a request of a worker, before a server reports it
SILENT_WORKER_TICK_S = 1.0  # the longest interval between two looks for silent workers
NCCL_VERDICT_S = 1.0  # for the watcher's verdict, after an error of NCCL
DESCRIPTOR_S = 10.0  # for a connected rank to pass a descriptor: it answers at once, unless it has died

assert LIMIT_VERDICT_S > QUERY_S + STACK_S
assert QUERY_S > STACK_S, "the state of a rank is its stack"
assert SNAPSHOT_S > SAMPLE_PERIOD_S + QUERY_S + STACK_S

# Verdicts: the first failure (watch/job_state.py).

FIRST_DEATH_S = 0.05  # after a death by the launcher's signal: the death that caused it is known
FIRST_DEATH_FAR_S = 0.3  # the same, if that was on another node: Open MPI aborts a rank that has lost a connection
SAME_ERROR_S = 0.2  # for the others to fail of the same error by themselves
LAUNCHER_ENDS_RANKS_S = 2.0  # after a death, or after its own end, a launcher that ends all ranks has done so
REPORT_DEATH_S = 0.5  # the watcher stays after a death: which death to report may be known a moment later

assert FIRST_DEATH_S < FIRST_DEATH_FAR_S < REPORT_DEATH_S < LAUNCHER_ENDS_RANKS_S
assert FIRST_DEATH_S <= WATCHER_TICK_S < SAME_ERROR_S
assert FIRST_DEATH_FAR_S < NCCL_VERDICT_S
assert FIRST_DEATH_FAR_S + SAME_ERROR_S < LOST_CONNECTION_S

# The end of a job: ranks unwind and linger, one is released and aborts (watch/release.py, watch/exit.py, exit.c).

UNWIND_S = 2.0  # for the ranks to unwind, from the first that has
RELEASE_S = 3.0  # for the release of a rank that lingers, or the next `hold`
HOLD_PERIOD_S = 0.5  # of the message `hold` to lingering ranks, while a rank is busy
PRINT_HOLD_S = 5.0  # a hold of this length is printed
OUTPUT_S = 0.1  # for mpirun to print the output of ranks that have unwound; it has no fixed order
ABORT_S = 8.0  # from the release to the end of the job; then the watchers kill the ranks
ABORT_SOON_S = 1.0  # the same, if a host is unreachable, or after the death of the released rank
LEAVE_S = 3.0  # from the failure of a rank to its end: threads and atexit functions may run
LEAST_LEAVE_S = 0.5  # the same, from the end of Python's own atexit functions
FOLLOWER_LEAVE_S = 10.0  # as LEAVE_S, if another rank has failed before; RELEASE_LIMIT_NS of csrc/python/exit.c
DRAIN_S = 0.2  # between the last output of a rank and its abort; DRAIN_US of csrc/python/exit.c
LINGER_READ_S = 0.5  # interval at which a lingering rank looks: its signal handler may have read the message already
LAUNCHER_SIGNAL_S = 0.5  # for the launcher to end by itself, then for its end after SIGTERM
FAILED_LAUNCHER_S = 30.0  # for the launcher of a job that failed to end by itself

assert RELEASE_S > UNWIND_S + OUTPUT_S + WATCHER_TICK_S, "else a rank aborts the job before the others have unwound"
assert FOLLOWER_LEAVE_S > LEAVE_S + RELEASE_S, "the failed rank ends the job, and its traceback comes last"
assert max(RELEASE_S, LEAVE_S + DRAIN_S) < ABORT_S
assert IDLE_S > UNWIND_S + ABORT_S + ABORT_SOON_S, "the end of a job is precise"
assert HOLD_PERIOD_S + LINGER_READ_S < RELEASE_S
assert LEAST_LEAVE_S < LEAVE_S
assert DRAIN_S >= OUTPUT_S

# Tasks without a launcher (launch/).

REMIND_TASKS_S = 5.0  # interval of the message that names the missing tasks
REPORT_TASKS_S = 0.5  # the shortest interval of the messages to all tasks that wait, with the missing ones
ADDRESS_FREE_S = 3.0  # how long the process of an earlier job may keep an address
EXCHANGE_POLL_S = 0.1  # interval at which a wait for the rendezvous checks whether the watcher has reported a death
RENDEZVOUS_DEATH_S = 0.5  # before the others are ended in MPI_Init: they may fail with the same error

assert RENDEZVOUS_DEATH_S > SAME_ERROR_S

# Agents of an elastic job (membership/agent.py).

LEASE_S = 8.0  # after which an agent ends with its processes, if `allred run` has answered none of its heartbeats
LOST_AGENT_S = 10.0  # after the last heartbeat of an agent, its host is lost, and the others go on
CHIEF_CONNECT_S = 1.0  # for an agent to connect to the watcher of the chief's node
NEXT_WATCHER_S = 3.0  # from the end of a world's watcher to the next one, for the process of the metrics
AGENT_END_S = 0.2  # from the end of an agent's connection to the end of all its processes

assert HELLO_S + CHIEF_CONNECT_S + STACK_S < LEASE_S, "an agent waits for one process at a time"
assert HEARTBEAT_PERIOD_S < LEASE_S < LOST_AGENT_S - 2 * HEARTBEAT_PERIOD_S, "never two worlds that both train"

# `allred run` (run/).

HOST_FILE_S = 1.0  # interval at which the host file is read
FIRST_LOOK_S, LOOK_S = 0.1, 1.0  # intervals of looks at the launcher's daemons: the first, and after doubling the last
ORPHANED_S = 5.0  # for mpirun to end after its last child process: the program may leave a process
MPIRUN_LOST_HOST_S = 10.0  # for mpirun to end after a host was lost: it may wait for that host forever
TERMINATE_S = 5.0  # from SIGTERM to SIGKILL
REPORTS_S = 5.0  # for the last reports after mpirun has ended
LEFTOVER_S = 10.0  # for processes that are left then, such as ranks that write a checkpoint
PROBE_S = 10.0  # for a host to start a process
RESIZE_S = 10.0  # for `allred run` to answer `allred resize`
RESTART_DELAY_S = 0.5  # before the first restart; doubles with each start that made no progress
LONGEST_RESTART_DELAY_S = 60.0
PRINT_FIRST_S = 1.0  # by which other ranks end later than the one that prints: a launcher ends all with the first

assert REPORTS_S > REPORT_DEATH_S + WATCHER_TICK_S, "a watcher reports until its end"
assert MPIRUN_LOST_HOST_S > UNWIND_S + ABORT_SOON_S + 2 * LAUNCHER_SIGNAL_S, "the watchers end mpirun before"
assert max(ABORT_S, REPORTS_S) < LEFTOVER_S

# Spark (spark/).

RANK_EXIT_S = 15.0  # for a rank to end after a failure. After success it waits for the others, as under mpirun
DRIVER_LOST_S = 60.0  # without an answer of the driver's machine
OUTCOMES_S = 3.0  # for the outcomes of the other ranks after a failure, to find the first one
TASKS_END_S = 5.0  # for Spark tasks to end by themselves, because the ranks have ended
REMIND_ROWS_S = 10.0  # interval of the message that a rank or a task waits for the other

assert RANK_EXIT_S > FOLLOWER_LEAVE_S + RELEASE_S
