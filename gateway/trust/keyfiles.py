"""Secret files of a cell: made once, readable by their owner only, never logged.

Two processes that want the same file at once get the same content: a file appears whole, by link, or not
at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from grid.errors import InternalError

SECRETS_FOLDER = "secrets"
LINK_KEY_FILE = "link.key"
"""What peers of the cell prove to each other that they know."""
KEY_BYTES = 32
"""256 bits, the size of the HMAC-SHA256 output that these keys drive."""


def secret_path(state_dir: Path, name: str) -> Path:
    return state_dir.expanduser().absolute() / SECRETS_FOLDER / name


def read_secret(path: Path) -> bytes:
    """Return the content of a secret file. Raises InternalError naming the path, never the content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InternalError(
            f"the secret file {path} can't be read ({error.strerror}); `grid up` makes it"
        ) from None
    if not content:
        raise InternalError(f"the secret file {path} is empty; restore it from a backup, or remove it")
    return content


def read_or_make_secret(path: Path, content: bytes | None = None) -> bytes:
    """Return the content of `path`, after writing `content` (by default 32 random bytes) if it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content if content is not None else secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return read_secret(path)
