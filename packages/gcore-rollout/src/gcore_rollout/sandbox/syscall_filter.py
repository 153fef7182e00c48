"""The seccomp filter of sandboxed programs: the system calls that they are denied.

A program of the Python standard library needs none of them. They reach beyond the process (keyrings, mounts,
namespaces, other processes), hold memory that no limit of a process counts (System V segments, message queues, files in
memory), or are large interfaces of the kernel in which faults are found often (bpf, io_uring, userfaultfd, perf).
"""

import errno
import struct

from gcore_rollout.errors import RolloutError

# Operation codes of classic BPF, each with a constant operand.
LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
JUMP_IF_ANY_BIT = 0x45
RETURN = 0x06

# Offsets in `struct seccomp_data`.
CALL_NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
"""Both machines are little-endian, so this is the argument's lower half."""

ALLOW = 0x7FFF0000
"""SECCOMP_RET_ALLOW."""
FAIL = 0x00050000
"""SECCOMP_RET_ERRNO, to which the number of the error is added."""

MACHINES = ("x86_64", "aarch64")
AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)

DENIED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
}
"""System calls that fail with EPERM, and their numbers on each of `MACHINES`; None where there is no such call."""

CLONE = (56, 220)
NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW flags that `clone` knows."""
CLONE3 = 435
"""It takes its flags from memory, which a filter cannot read. As on a kernel without it, libraries call `clone`."""
SOCKET_CALLS = ((41, 53), (198, 199))
"""The numbers of `socket` and `socketpair`."""
SOCKET_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""The others are denied: a network namespace does not hold all of them, AF_VSOCK for one."""
FIRST_UNKNOWN_CALL = 463
"""Linux 6.13 has added it. Calls from here on, which include all of the x32 interface, do not exist for a program."""


def build_syscall_filter(machine: str) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Args:
        machine: as `os.uname` has it, one of `MACHINES`; a `RolloutError` for any other.
    """
    if machine not in MACHINES:
        expected = " or ".join(MACHINES)
        raise RolloutError(
            f"machine is {machine!r}; expected {expected}, for which the sandbox has a filter of calls"
        )
    index = MACHINES.index(machine)
    denied = _return(FAIL | errno.EPERM)
    missing = _return(FAIL | errno.ENOSYS)

    code = _instruction(LOAD, ARCHITECTURE)
    # A program may make the calls of another architecture, whose numbers differ.
    code += _instruction(JUMP_IF_EQUAL, AUDIT_ARCHITECTURES[index], if_true=1)
    code += denied
    code += _instruction(LOAD, CALL_NUMBER)
    code += _instruction(JUMP_IF_AT_LEAST, FIRST_UNKNOWN_CALL, if_false=1)
    code += missing
    code += _if_equal(CLONE3, missing)
    for numbers in DENIED.values():
        number = numbers[index]
        if number is not None:
            code += _if_equal(number, denied)

    flag_check = _instruction(LOAD, FIRST_ARGUMENT)
    flag_check += _instruction(JUMP_IF_ANY_BIT, NEW_NAMESPACES, if_false=1)
    flag_check += denied
    flag_check += _return(ALLOW)
    code += _if_equal(CLONE[index], flag_check)

    family_check = _instruction(LOAD, FIRST_ARGUMENT)
    for family in SOCKET_FAMILIES.values():
        family_check += _if_equal(family, _return(ALLOW))
    family_check += denied
    for number in SOCKET_CALLS[index]:
        code += _if_equal(number, family_check)
    return code + _return(ALLOW)


def _if_equal(operand: int, instructions: bytes) -> bytes:
    """Run instructions, which all end in a result, if the loaded number equals the operand."""
    return _instruction(JUMP_IF_EQUAL, operand, if_false=len(instructions) // 8) + instructions


def _return(result: int) -> bytes:
    return _instruction(RETURN, result)


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a `struct sock_filter`; the jumps are counts of instructions to leave out."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)
