# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files written whole or not at all, and hashed."""

import hashlib
import json
import os
from pathlib import Path


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write `path` aside, flush it to disk and rename it, so that no half file stands under the final name."""
    aside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    with open(aside, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


def write_json(path: Path, value) -> None:
    """Write `value` as indented JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
