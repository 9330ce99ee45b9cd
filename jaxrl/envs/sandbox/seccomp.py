"""The filter of system calls behind which code runs in a sandbox.

It refuses what namespaces and resource limits do not bound: sockets that reach outside (vsock has
no namespace), memory that belongs to no process, looks into and settings of other processes,
children that nobody waits for, namespaces within the namespace, keys, and kernel interfaces with a
history of holes.
"""

Line = tuple[int, int, int, int]
"""An instruction: code, lines to skip if true, if false, and the operand."""

# Numbers of system calls by machine; those from 424 on are the same everywhere.
CALLS = {
    "x86_64": {
        **{"socket": 41, "clone": 56, "pivot_root": 155, "unshare": 272, "setns": 308},
        **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
        **{"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "open_by_handle_at": 304},
        **{"add_key": 248, "request_key": 249, "keyctl": 250},
        **{"memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "mmap": 9},
        **{"sendfile": 40, "splice": 275, "tee": 276, "vmsplice": 278, "io_setup": 206},
        **{"inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300},
        **{"socketpair": 53, "setsockopt": 54, "rt_sigaction": 13, "prlimit64": 302},
        **{"setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144},
        **{"sched_setaffinity": 203, "sched_setattr": 314, "ioprio_set": 251},
    },
    "aarch64": {
        **{"socket": 198, "clone": 220, "pivot_root": 41, "unshare": 97, "setns": 268},
        **{"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272},
        **{"bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265},
        **{"add_key": 217, "request_key": 218, "keyctl": 219},
        **{"memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "mmap": 222},
        **{"sendfile": 71, "splice": 76, "tee": 77, "vmsplice": 75, "io_setup": 0},
        **{"inotify_init1": 26, "fanotify_init": 262},
        **{"socketpair": 199, "setsockopt": 208, "rt_sigaction": 134, "prlimit64": 261},
        **{"setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119},
        **{"sched_setaffinity": 122, "sched_setattr": 274, "ioprio_set": 30},
    },
}
_EVERYWHERE = {
    **{"io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447},
    "landlock_create_ruleset": 444,  # its rules are memory of the kernel, without a bound
}
_CLONE3 = 435
_X32_CALLS = 0x40000000  # a second numbering of the calls of x86_64
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS .. CLONE_NEWNET and CLONE_NEWTIME
_ALL = 0xFFFFFFFF
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES, _SO_SNDBUF = 1, 1, 0xF, 7
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_SIGCHLD = 17

Test = tuple[int, int, bool, int]
"""Describes a test of an argument: its word (two to an argument), the bits that count, whether they
must be equal to or differ from the operand, and the operand."""

# Refused if every test is true; a call may have several lines.
_REFUSED_IF: list[tuple[str, list[Test]]] = [
    ("clone", [(0, _NEW_NAMESPACES, False, 0)]),
    # A stream holds at most what its one peer may send; many may send to a socket of datagrams.
    *((call, [(0, _ALL, False, _AF_UNIX)]) for call in ("socket", "socketpair")),
    *((call, [(2, _SOCK_TYPES, False, _SOCK_STREAM)]) for call in ("socket", "socketpair")),
    ("setsockopt", [(4, _ALL, True, _SO_SNDBUF)]),
    # Its pages stay when no process has them mapped any more.
    ("mmap", [(6, _MAP_SHARED | _MAP_ANONYMOUS, True, _MAP_SHARED | _MAP_ANONYMOUS)]),
    ("mmap", [(6, _MAP_HUGETLB, False, 0)]),  # of a pool of the host; no count of a process has it
    # A parent that ignores the signal has the CPU seconds of its children forgotten. The second
    # argument is a pointer, which is null where the call only asks.
    *(("rt_sigaction", [(0, _ALL, True, _SIGCHLD), (w, _ALL, False, 0)]) for w in (2, 3)),
    # Of another process than the caller: without root's rights process 1 is of the same user.
    *(
        (call, [(0, _ALL, False, 0)])
        for call in ("prlimit64", "sched_setparam", "sched_setscheduler")
    ),
    *((call, [(0, _ALL, False, 0)]) for call in ("sched_setaffinity", "sched_setattr")),
    *(("setpriority", [(word, _ALL, False, 0)]) for word in (0, 2)),
]
_WITH_ARGUMENTS = {"pivot_root", *(call for call, _ in _REFUSED_IF)}  # allowed, but for those above

_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANSWER = 0x20, 0x54, 0x15, 0x35, 0x06  # of BPF
_ALLOW, _KILL, _NOT_PERMITTED, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def filter_lines(machine: str) -> list[Line]:
    """Return the filter for a machine of `CALLS`, in instructions of classic BPF (seccomp(2))."""
    calls = CALLS[machine]
    refused = [number for name, number in calls.items() if name not in _WITH_ARGUMENTS]
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_CALLS),
        (_ANSWER, 0, 0, _NOT_PERMITTED),
        # Its flags lie in memory, where a filter cannot look; the C library then uses clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_ANSWER, 0, 0, _NO_SUCH_CALL),
    ]
    for number in (*refused, *_EVERYWHERE.values()):
        lines += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _NOT_PERMITTED)]
    for call, tests in _REFUSED_IF:
        lines += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 3 * len(tests) + 1, calls[call])]
        for i, (word, bits, equal, operand) in enumerate(tests):
            past = 3 * (len(tests) - i - 1) + 1  # the lines of this rule that are then skipped
            lines += [(_LOAD, 0, 0, _ARGUMENTS + 4 * word), (_AND, 0, 0, bits)]
            lines += [(_EQUAL, *((0, past) if equal else (past, 0)), operand)]
        lines += [(_ANSWER, 0, 0, _NOT_PERMITTED)]
    return [*lines, (_ANSWER, 0, 0, _ALLOW)]
