"""Where a cell keeps its files on this machine. Two folders: one that lasts, and a short one for sockets."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from grid.errors import InternalError


def short_folder(state_dir: Path) -> Path:
    """Return the folder for Unix sockets of the cell whose state is in `state_dir`.

    Their paths end at 107 bytes, and Ray and HAProxy put 60 bytes of their own behind it, so it can't lie
    under a state folder of any length. The same state folder gives the same path in every process,
    whatever its environment (so not TMPDIR).
    """
    mark = hashlib.sha256(os.fsencode(state_dir.expanduser().absolute())).hexdigest()[:12]
    return Path(f"/tmp/zerogrid-{os.getuid()}-{mark}")


def private_folder(folder: Path) -> Path:
    """Make `folder` with mode 0700 and return it.

    Raises InternalError when it exists but is another user's or a link: in a shared folder such as /tmp
    somebody may have put it there first.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise InternalError(
            f"{folder} is not a folder of this user; remove it, or set cell.state_dir elsewhere"
        )
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
