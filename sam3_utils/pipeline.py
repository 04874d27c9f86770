# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Batches that stay the same over restarts, work done ahead in threads, and result folders that survive a kill."""

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sam3_utils import files
from sam3_utils.cli import UsageError
from sam3_utils.images import PictureError, load_rgb, prepare
from sam3_utils.stages import stage

logger = logging.getLogger(__name__)


def run_batches(
    model, processor, batches: Iterable[list | None], tokens: dict, ahead: int = 2
) -> Iterator[tuple[list, dict[str, np.ndarray], list[str | None]]]:
    """Run fixed batches, the pictures of the next ones decoded and prepared in threads meanwhile, each once.

    Args:
        batches: lists of items with `path`, `size` (height, width) and `prompt`, the items of a picture in a row; None
            says that the source has nothing at the moment.
        tokens: prompt -> its rows of input_ids and attention_mask.
        ahead: how many batches are prepared early, which bounds the memory.

    Yields:
        The batch, its outputs by the contract's names, and for each item None or why its picture cannot be used. Such
        an item's place is filled with zeros: a batch of the same shape is computed the same to the last bit,
        whatever became of its neighbours, and so is a run that was killed and went on.
    """
    with ThreadPoolExecutor(2) as pool:
        queue: deque = deque()
        last_key, last = None, None

        def infer_oldest():
            batch, futures = queue.popleft()
            pictures, errors = [], []
            for future in futures:
                try:
                    pictures.append(future.result())
                    errors.append(None)
                except PictureError as error:
                    pictures.append(None)
                    errors.append(str(error))
            side = model.shapes.image_size
            blank = np.zeros((3, side, side), dtype=np.float32)
            ids, masks = zip(*(tokens[item.prompt] for item in batch))
            feeds = {
                "pixel_values": np.stack([blank if picture is None else picture for picture in pictures]),
                "input_ids": np.stack(ids),
                "attention_mask": np.stack(masks),
            }
            return batch, infer_padded(model, feeds), errors

        for batch in batches:
            if batch is not None:
                futures = []
                for item in batch:
                    if last is None or (item.path, item.size) != last_key:
                        last_key = (item.path, item.size)
                        last = pool.submit(_prepared, processor, *last_key)
                    futures.append(last)
                queue.append((batch, futures))
            if queue and (batch is None or len(queue) > ahead):
                yield infer_oldest()
        while queue:
            yield infer_oldest()


def _prepared(processor, path: Path, size: tuple[int, int]) -> np.ndarray:
    with stage("decode"):
        picture = load_rgb(path, size)
    with stage("prepare"):
        return prepare(processor, picture)


def batch_size_for(model, asked: int | None) -> int:
    """The batch to use: as asked, or the model's own `batch_size`.

    Raises:
        UsageError: the OM was compiled for another batch.
    """
    if asked is None:
        return model.batch_size
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
    """A file of JSON lines that only grows; a last line that a kill has cut short does not count."""

    def __init__(self, path: Path):
        self.path = path
        self._mended = False

    def read(self) -> list[dict]:
        """All records so far.

        Raises:
            UsageError: a line is damaged.
        """
        if not self.path.exists():
            return []
        # Not splitlines(): a phrase may hold one of Unicode's other line separators.
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise UsageError(f"{self.path}: damaged ({error}); start anew with --overwrite") from None

    def append(self, records: list[dict]) -> None:
        """Write records and wait until they are on the disk."""
        if records:
            if not self._mended and self.path.exists():
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
            self._mended = True
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                stream.flush()
                os.fsync(stream.fileno())


def open_run_folder(folder: Path, identity: dict, names: tuple[str, ...], overwrite: bool) -> bool:
    """Make a result folder ready for a new run, or for going on with the same one.

    Args:
        identity: what must be equal to go on (model and data hashes, settings); kept in `run.json`.
        names: the files and folders that a run writes beside `run.json`; `overwrite` removes just these.

    Returns:
        Whether the same run is already finished (its `summary.json` is there).

    Raises:
        UsageError: a run of something else, of nobody knows what, or one still running is in the folder.
    """
    manifest, summary = folder / "run.json", folder / "summary.json"
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    if overwrite:
        for name in (*names, "run.json"):  # run.json last: records without it would belong to nobody
            _remove(folder / name)
    if manifest.exists():
        try:
            before = json.loads(manifest.read_text(encoding="utf-8"))
        except ValueError:
            raise UsageError(f"{manifest}: damaged; start anew with --overwrite") from None
        # As JSON writes it, so that tuples and lists compare equal.
        differing = [key for key, value in json.loads(json.dumps(identity)).items() if before.get(key) != value]
        if differing:
            raise UsageError(
                f"{folder}: holds a run with another {', '.join(differing)}; give another --output_dir or --overwrite"
            )
    else:
        strangers = [name for name in names if (folder / name).exists()]
        if strangers:
            raise UsageError(
                f"{folder}: holds {strangers[0]} of an unknown run; give another --output_dir or --overwrite"
            )
        files.write_json(manifest, identity)
    return summary.exists()


def _lock(folder: Path) -> None:
    """Hold the folder until the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        logger.warning("%s: cannot be locked on this system; do not start a second run there", folder)
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"{folder}: another run is writing here; wait for it or give another --output_dir") from None


def hold_shared(folder: Path) -> None:
    """Mark, until this process ends, that it writes into `folder`."""
    import fcntl

    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)


def wait_for_workers(folder: Path) -> None:
    """Wait for the last batch of workers whose parent was killed: they may still write into `folder`."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        logger.warning("%s: waiting for workers of a run that was killed", folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            _remove(child)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
