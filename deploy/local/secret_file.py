"""The files with a cluster's secrets, created by the first broker that needs them: the secret by which brokers know
each other, and their credential for ZooKeeper.

    python -m minibroker.deploy.local.secret_file PATH...

`minibroker up` creates them in its data directory. In containers each broker runs the command above before it starts,
on a volume that all brokers share: no user has to create a secret, and none is in the repository, in an image or on a
command line. The credential is for files named `zookeeper.digest`, the secret for all others.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path

FILE_NAME = "broker.secret"
DIGEST_FILE_NAME = "zookeeper.digest"


def make(path: Path) -> None:
    """Create the file, readable by its owner alone, unless it exists. Brokers that do so at the same time end up with
    one secret. Raises OSError."""
    if path.exists():
        return
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # its mode is 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            user = "minibroker:" if path.name == DIGEST_FILE_NAME else ""
            file.write(f"{user}{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it fails if another broker was faster
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


def main() -> int:
    for path in map(Path, sys.argv[1:]):
        try:
            make(path)
        except OSError as error:
            print(
                f"error: {path}, a secret of this cluster's brokers, cannot be made: {error.strerror}; mount a volume "
                f"at {path.parent} that user {os.getuid()} can write, the same for all brokers",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
