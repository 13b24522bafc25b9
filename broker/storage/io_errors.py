"""The meaning of an operating system's error for the call that met it and for the log directory. Decided only here.

Not every error of a file's call means a failed disk. Treating one of the first two kinds below as such would cost all
replicas of the directory, and the broker if it has no other directory.

- **A shortage**: the process or the host has run out of a resource. EMFILE and ENFILE come only from calls that open,
  which have written nothing. ENOMEM and EAGAIN count as a shortage in a read; a write that met them may have written
  any part. Only that call fails, and it may be repeated.
- **A bug**: EBADF, EFAULT, EINVAL and ESPIPE say that the call makes no sense. A wrong read changes nothing, so its
  caller gets an error. A wrong write is a broken invariant, and the disk may hold anything.
- **A failure** is everything else, until the next start: the disk's own errors, as EIO and ENOSPC; files that are gone
  or forbidden (ENOENT, EACCES, EROFS); unknown errors; and each of the above if it left a change half done. After a
  failed write or fsync of unknown extent nothing may go on as if it had not happened.
"""

from __future__ import annotations

import errno
from enum import Enum, auto

from minibroker.protocol.errors import BrokerError, ErrorCode

DISK_ERRORS = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""They are about the disk, not about the file on which they occurred."""

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_SHORTAGES = _NO_DESCRIPTORS | {errno.ENOMEM, errno.EAGAIN}
_BUGS = frozenset({errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ESPIPE})


class Trouble(Enum):
    SHORTAGE = auto()
    BUG = auto()
    FAILURE = auto()


def trouble_of(error: BaseException, *, is_read: bool = False) -> Trouble:
    """Return the meaning of `error` for a call that changes nothing (`is_read`), or whose steps the next attempt all
    repeats."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (_SHORTAGES if is_read else _NO_DESCRIPTORS):
        return Trouble.SHORTAGE
    return Trouble.BUG if is_read and number in _BUGS else Trouble.FAILURE


class Shortage(BrokerError):
    """A call could not be carried out, and nothing is wrong with the disk: it may be tried again."""


def shortage(doing: str, reason: object) -> Shortage:
    return Shortage(
        ErrorCode.KAFKA_STORAGE_ERROR,
        f"{doing} failed: {reason}. The disk is well: where there are too few file descriptors (`ulimit -n`), raise "
        f"the hard limit of this process (LimitNOFILE of systemd, `--ulimit nofile` of Docker), or have fewer segments",
        is_complete=True,
    )
