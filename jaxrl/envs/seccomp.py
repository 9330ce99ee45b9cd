"""The filter of system calls behind which code runs in a sandbox.

It refuses what namespaces and resource limits do not bound: sockets that reach outside (vsock has
no namespace), memory that belongs to no process, looks into other processes, namespaces within the
namespace, keys, and kernel interfaces with a history of holes.
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
        **{"memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64},
    },
    "aarch64": {
        **{"socket": 198, "clone": 220, "pivot_root": 41, "unshare": 97, "setns": 268},
        **{"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272},
        **{"bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265},
        **{"add_key": 217, "request_key": 218, "keyctl": 219},
        **{"memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190},
    },
}
_EVERYWHERE = {"io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447}
_CLONE3 = 435
_WITH_ARGUMENTS = {"socket", "clone", "pivot_root"}  # allowed, some with some arguments only
_X32_CALLS = 0x40000000  # a second numbering of the calls of x86_64
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS .. CLONE_NEWNET and CLONE_NEWTIME
_AF_UNIX = 1
_NUMBER, _ARCH, _ARGUMENT_0 = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
_ALLOW, _KILL, _NOT_PERMITTED, _NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def filter_lines(machine: str) -> list[Line]:
    """The filter for a machine of `CALLS`, as instructions of classic BPF (seccomp(2))."""
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
    return [
        *lines,
        (_EQUAL, 0, 4, calls["clone"]),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_ANSWER, 0, 0, _NOT_PERMITTED),
        (_ANSWER, 0, 0, _ALLOW),
        (_EQUAL, 0, 3, calls["socket"]),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_ANSWER, 0, 0, _NOT_PERMITTED),
        (_ANSWER, 0, 0, _ALLOW),
    ]
