"""What an error of the operating system means, for the call that met it and for the log directory: decided here alone.

An error is not a failed disk because it came from a call for a file. Taken for one, any of these costs all replicas of
the directory, and the broker, if it has no other directory.

- **A shortage**: the process or the host has run out of something. EMFILE and ENFILE come only from calls that open:
  nothing was written by them. ENOMEM and EAGAIN count as a shortage where something was read; a write that met them may
  have written any part. That one call fails, and may be tried again.
- **A bug**: EBADF, EFAULT, EINVAL and ESPIPE say that the call makes no sense. Of what was read wrongly nothing is
  changed, so whoever asked is told that it failed. A write that makes no sense is a broken invariant, and what is on
  disk is anybody's guess.
- **A failure** is everything else, for ever: whatever the disk says, as EIO and ENOSPC; that files are gone or may not
  be touched any more (ENOENT, EACCES, EROFS); what nobody has thought of; and each of the above where a change was left
  halfway. After a failed write or fsync of unknown extent nothing may go on as if it had not happened.
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
    """What `error` says of a call that changes nothing (`is_read`), or changes something in steps each of which is done
    again by the next attempt."""
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
