# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Batches that stay the same over restarts, work done ahead in threads, and result folders that survive a kill."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sam3_utils import files
from sam3_utils.cli import UsageError


def work_ahead(work: Callable, items: Iterable, workers: int = 2, ahead: int = 8) -> Iterator[tuple[object, Future]]:
    """Yield (item, finished or running future of work(item)) in order, at most `ahead` items early."""
    with ThreadPoolExecutor(workers) as pool:
        queue: deque = deque()
        try:
            for item in items:
                queue.append((item, pool.submit(work, item)))
                if len(queue) > ahead:
                    yield queue.popleft()
            while queue:
                yield queue.popleft()
        finally:
            for _, future in queue:
                future.cancel()


def batch_size_for(model, asked: int) -> int:
    """The batch to use: an OM's own, anything else as asked.

    Raises:
        UsageError: the OM was compiled for another batch.
    """
    if model.shapes.batch not in (None, asked):
        raise UsageError(
            f"--batch_size {asked}: the model was compiled for batches of {model.shapes.batch}; "
            f"give --batch_size {model.shapes.batch}"
        )
    return asked


def infer_padded(model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run up to a full batch; for a static model the last rows are repeated and the repeats' results dropped.

    Args:
        feeds: arrays by the contract's names, n rows each.

    Returns:
        outputs by the contract's names, n rows each.
    """
    rows = len(feeds["pixel_values"])
    missing = (model.shapes.batch or rows) - rows
    if missing:
        feeds = {name: np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) for name, array in feeds.items()}
    return {name: array[:rows] for name, array in model.infer(feeds).items()}


class RecordFile:
    """A file of JSON lines that only grows; a line cut by a kill is taken off when it is opened again."""

    def __init__(self, path: Path):
        self.path = path
        if path.exists():
            whole = path.read_bytes()
            good = whole[: whole.rfind(b"\n") + 1]
            if len(good) < len(whole):
                with open(path, "r+b") as stream:
                    stream.truncate(len(good))

    def read(self) -> list[dict]:
        """All records so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def append(self, records: list[dict]) -> None:
        """Write records and wait until they are on the disk."""
        if records:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                stream.flush()
                os.fsync(stream.fileno())


def open_run_folder(folder: Path, identity: dict, names: tuple[str, ...], overwrite: bool) -> None:
    """Make a result folder ready for a new run, or for going on with the same one.

    Args:
        identity: what must be equal to go on (model and data hashes, settings); kept in `run.json`.
        names: the files and folders that a run writes beside `run.json`; `overwrite` removes just these.

    Raises:
        UsageError: a finished run, one of something else, or one still running is in the folder.
    """
    manifest, summary = folder / "run.json", folder / "summary.json"
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    if overwrite:
        for name in ("run.json", *names):
            _remove(folder / name)
    if manifest.exists():
        before = json.loads(manifest.read_text(encoding="utf-8"))
        # As JSON writes it, so that tuples and lists compare equal.
        differing = [key for key, value in json.loads(json.dumps(identity)).items() if before.get(key) != value]
        if differing:
            raise UsageError(
                f"{folder}: holds a run with another {', '.join(differing)}; give another --output_dir or --overwrite"
            )
        if summary.exists():
            raise UsageError(f"{folder}: holds a finished run; give another --output_dir or --overwrite")
    files.write_json(manifest, identity)


def _lock(folder: Path) -> None:
    """Hold the folder until the process ends, however it ends."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"{folder}: another run is writing here; wait for it or give another --output_dir") from None


def _remove(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _remove(child)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
