# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the service keeps on disk: pictures as files, and in SQLite what was asked of them and answered.

A session is one object or concept on one picture: a list of steps, each a prompt, its answer and, for clicks, the
logits that the next click corrects. All of it is on disk before an answer leaves, so that a killed service has lost
nothing.
"""

import json
import sqlite3
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SCHEMA = """
CREATE TABLE IF NOT EXISTS images (
    image_id TEXT PRIMARY KEY, name TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, image_id TEXT NOT NULL REFERENCES images ON DELETE CASCADE, kind TEXT NOT NULL,
    name TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, number INTEGER NOT NULL,
    prompt TEXT NOT NULL, result TEXT NOT NULL, logits BLOB, side INTEGER, PRIMARY KEY (session_id, number)
);
CREATE INDEX IF NOT EXISTS sessions_of_image ON sessions (image_id);
"""


class Store:
    """Pictures and sessions below one folder. Methods may be called from any thread."""

    def __init__(self, folder: Path):
        """Raises sqlite3.Error or OSError where the folder cannot be used."""
        self._images = folder / "images"
        self._images.mkdir(parents=True, exist_ok=True)
        for left in self._images.glob("*.tmp*"):
            left.unlink()  # of a service that was killed
        self._lock = threading.Lock()
        self._database = sqlite3.connect(folder / "sessions.sqlite3", check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(SCHEMA)

    @contextmanager
    def _changing(self):
        """One transaction, alone."""
        with self._lock, self._database:
            yield self._database

    def _rows(self, query: str, *values) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def add_image(self, image_id: str, data: bytes, name: str, size: tuple[int, int]) -> None:
        """Keep a picture's bytes; `size` is (height, width). One that is there already keeps its name."""
        path = self._images / image_id
        if not path.is_file():
            aside = path.with_name(f"{image_id}.tmp{uuid.uuid4().hex}")
            aside.write_bytes(data)
            aside.replace(path)
        with self._changing() as database:
            values = image_id, name, size[1], size[0], time.time()
            database.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)", values)

    def image(self, image_id: str) -> dict | None:
        """image_id, name, width and height of a picture, or None."""
        rows = self._rows("SELECT image_id, name, width, height FROM images WHERE image_id = ?", image_id)
        return dict(rows[0]) if rows else None

    def images(self) -> list[dict]:
        """All pictures, the newest first."""
        rows = self._rows("SELECT image_id, name, width, height FROM images ORDER BY created DESC, rowid DESC")
        return [dict(row) for row in rows]

    def image_file(self, image_id: str) -> Path:
        """Where a picture's bytes are; `image_id` must come from `image`."""
        return self._images / image_id

    def delete_image(self, image_id: str) -> bool:
        """Drop a picture and its sessions; was it there?"""
        with self._changing() as database:
            found = database.execute("DELETE FROM images WHERE image_id = ?", (image_id,)).rowcount > 0
        if found:
            self.image_file(image_id).unlink(missing_ok=True)
        return found

    def add_step(
        self, session_id: str | None, image_id: str, prompt: dict, result: dict, logits: np.ndarray | None, anew=False
    ) -> str:
        """Append a step to a session, or begin one; returns the session's id.

        Args:
            result: from `results.as_json`. logits: (K, A, A) float32 of a visual prompt.
            anew: drop the session's earlier steps, in the same transaction.
        """
        blob = None if logits is None else np.ascontiguousarray(logits, np.float32).tobytes()
        side = None if logits is None else logits.shape[-1]
        with self._changing() as database:
            if session_id is None:
                session_id = uuid.uuid4().hex
                values = session_id, image_id, result["kind"], prompt.get("text", ""), time.time()
                database.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", values)
            if anew:
                database.execute("DELETE FROM steps WHERE session_id = ?", (session_id,))
            query = "SELECT COALESCE(MAX(number), 0) + 1 FROM steps WHERE session_id = ?"
            (number,) = database.execute(query, (session_id,)).fetchone()
            values = session_id, number, json.dumps(prompt), json.dumps(result), blob, side
            database.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", values)
        return session_id

    def session(self, session_id: str) -> dict | None:
        """A session with its last step: session_id, image_id, kind, name, steps (how many), prompt and result (None
        after the last undo); None for one that is not there."""
        rows = self._rows("SELECT session_id, image_id, kind, name FROM sessions WHERE session_id = ?", session_id)
        if not rows:
            return None
        query = "SELECT prompt, result FROM steps WHERE session_id = ? ORDER BY number DESC LIMIT 1"
        last = self._rows(query, session_id)
        (count,) = self._rows("SELECT COUNT(*) FROM steps WHERE session_id = ?", session_id)[0]
        found = {key: json.loads(last[0][key]) if last else None for key in ("prompt", "result")}
        return dict(rows[0]) | {"steps": count} | found

    def sessions(self, image_id: str) -> list[dict]:
        """All sessions of a picture, the oldest first."""
        rows = self._rows("SELECT session_id FROM sessions WHERE image_id = ? ORDER BY created, rowid", image_id)
        found = (self.session(row["session_id"]) for row in rows)
        return [session for session in found if session]

    def logits(self, session_id: str) -> np.ndarray | None:
        """(A, A) of the mask that was chosen in a session's last step, for the next click to correct."""
        rows = self._rows(
            "SELECT logits, side, result FROM steps WHERE session_id = ? ORDER BY number DESC LIMIT 1", session_id
        )
        if not rows or rows[0]["logits"] is None:
            return None
        side = rows[0]["side"]
        masks = np.frombuffer(rows[0]["logits"], np.float32).reshape(-1, side, side)
        return masks[json.loads(rows[0]["result"])["best"]]

    def choose(self, session_id: str, best: int) -> None:
        """Take another of the last step's masks."""
        with self._changing() as database:
            query = "SELECT number, result FROM steps WHERE session_id = ? ORDER BY number DESC LIMIT 1"
            number, result = database.execute(query, (session_id,)).fetchone()
            result = json.dumps(json.loads(result) | {"best": best})
            database.execute(
                "UPDATE steps SET result = ? WHERE session_id = ? AND number = ?", (result, session_id, number)
            )

    def rename(self, session_id: str, name: str) -> None:
        """Give a session's object a name."""
        with self._changing() as database:
            database.execute("UPDATE sessions SET name = ? WHERE session_id = ?", (name, session_id))

    def undo(self, session_id: str) -> None:
        """Drop a session's last step."""
        with self._changing() as database:
            last = "SELECT MAX(number) FROM steps WHERE session_id = ?1"
            database.execute(f"DELETE FROM steps WHERE session_id = ?1 AND number = ({last})", (session_id,))

    def delete_session(self, session_id: str) -> bool:
        """Drop a session; was it there?"""
        with self._changing() as database:
            return database.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,)).rowcount > 0

    def check(self) -> None:
        """Raises sqlite3.Error where the database cannot be read."""
        self._rows("SELECT 1")

    def close(self) -> None:
        """Finish what is written and let go of the file."""
        with self._lock:
            self._database.close()
