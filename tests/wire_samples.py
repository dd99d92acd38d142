"""Messages as a program at a scheduler's address may send them."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from distributed.protocol import dumps


class Hostile:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    @property
    def ran(self) -> bool:
        return self.path.exists()


def framed(message: Any) -> bytes:
    """The bytes of a message as Dask sends it."""
    frames = [bytes(each) for each in dumps(message)]
    sizes = [len(each) for each in frames]
    prelude = struct.pack(f"{1 + len(frames)}Q", len(frames), *sizes)
    return struct.pack("Q", len(prelude) + sum(sizes)) + prelude + b"".join(frames)


def raw(content: bytes, size: int | None = None) -> bytes:
    size = len(content) if size is None else size
    return struct.pack("3Q", 16 + size, 1, size) + content
