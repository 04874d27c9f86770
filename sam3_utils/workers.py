# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""One spawned process per device; work handed out piece by piece; nothing lost when a process dies.

CANN and PyTorch do not survive a fork once they are in use, so workers are spawned, and each loads its model itself.
The parent talks to every worker through a pipe of its own: a shared queue could be left locked by a killed worker.
A worker writes its results to disk itself, before it reports them.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from sam3_utils.cli import CheckFailed, UsageError

logger = logging.getLogger(__name__)
SILENCE = 60  # seconds after which a device that says nothing is named
WINDOW = 2  # units a worker holds: one under work, one whose pictures are being decoded
MAX_DEATHS = 2  # a unit that this many workers died on is not given to a third


@dataclass
class _Worker:
    device: str
    process: multiprocessing.Process
    connection: Connection
    units: deque = field(default_factory=deque)
    ready: bool = False


def run_units(
    plan: Callable[[object], list],
    devices: list[str],
    work: Callable,
    settings: dict,
    on_progress: Callable[[object], None],
    rest_of: Callable[[object], object | None],
) -> list:
    """Have every unit done by one of the devices' workers.

    Args:
        plan: called once with what the first worker tells of its model; gives the units, picklable pieces of work
            with a `key`, in order.
        devices: a device for each worker; the same may be named twice (`cpu`, `cpu`).
        work: a module-level `work(device, settings, receive, report)` that runs in the worker: it loads its model,
            calls `report("ready", facts)`, takes units from the generator `receive()` (None: nothing at the moment),
            calls `report("progress", ...)` as it likes and `report("done")` when the oldest unit's results are on disk.
        on_progress: called in the parent with what a worker reports as progress.
        rest_of: what of a dead worker's unit is still to be done, or None when all of it is on disk.

    Returns:
        The units that were given up, each after `MAX_DEATHS` workers died on it.

    Raises:
        UsageError: a worker refused its model or device.
        CheckFailed: no worker is left, or one failed with an error that the others would meet too.
    """
    context = multiprocessing.get_context("spawn")
    pending, deaths, given_up = None, {}, []
    workers: list[_Worker] = []
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            # daemon: should this process fall without `_stop`, the interpreter ends its workers on the way out
            process = context.Process(target=_run_worker, args=(theirs, work, device, settings), daemon=True)
            process.start()
            theirs.close()  # so that the worker's end is the only one, and its death shows as end of file
            workers.append(_Worker(device, process, ours))
        alive = list(workers)
        while pending is None or pending or any(worker.units for worker in alive):
            if not alive:
                raise CheckFailed("every worker has died; what is done is on disk, the same command goes on")
            talking = wait([worker.connection for worker in alive], SILENCE)
            if not talking:
                silent = ", ".join(f"{worker.device} (process {worker.process.pid})" for worker in alive)
                logger.warning("no news for %d s from %s; a process that is ended passes its work on", SILENCE, silent)
            for connection in talking:
                worker = next(candidate for candidate in alive if candidate.connection is connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    alive.remove(worker)
                    _bury(worker, pending, deaths, given_up, rest_of)
                    continue
                if kind == "ready":
                    worker.ready = True
                    pending = deque(plan(value)) if pending is None else pending
                elif kind == "done":
                    worker.units.popleft()
                elif kind == "progress":
                    on_progress(value)
                elif kind == "usage":
                    raise UsageError(value)
                elif kind == "error":
                    raise CheckFailed(f"device {worker.device}: {value}")
            for worker in alive:
                while worker.ready and pending and len(worker.units) < WINDOW:
                    unit = pending.popleft()
                    worker.units.append(unit)
                    try:
                        worker.connection.send(unit)
                    except (BrokenPipeError, ConnectionResetError):
                        break  # its death is met in the next round, and the unit with it
        return given_up
    finally:
        _stop(workers)


def _bury(worker: _Worker, pending: deque, deaths: dict, given_up: list, rest_of: Callable) -> None:
    """Report a dead worker and give the rest of its work to the others."""
    worker.process.join()
    logger.warning(
        "device %s: its worker died (exit code %s); its work goes to the others", worker.device, worker.process.exitcode
    )
    for position, unit in enumerate(reversed(worker.units)):
        rest = rest_of(unit)
        if rest is None:
            continue
        if position == len(worker.units) - 1:  # the one under work
            deaths[rest.key] = deaths.get(rest.key, 0) + 1
            if deaths[rest.key] >= MAX_DEATHS:
                logger.warning("given up after %d workers died on it: %s", MAX_DEATHS, rest)
                given_up.append(rest)
                continue
        pending.appendleft(rest)
    worker.units.clear()


def _stop(workers: list[_Worker]) -> None:
    """End all workers: closed pipes let them finish the batch under work, ten seconds later they are killed."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not leave a worker behind
            signal.signal(number, signal.SIG_IGN)
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + 10
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _run_worker(connection: Connection, work: Callable, device: str, settings: dict) -> None:
    """What a worker process does: `work`, with its errors told to the parent, and an end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    def report(kind: str, value=None):
        try:
            connection.send((kind, value))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the parent has stopped us

    def receive():
        while True:
            try:
                yield connection.recv() if connection.poll(0.02) else None
            except (EOFError, ConnectionResetError):
                return

    try:
        work(device, settings, receive, report)
    except UsageError as error:
        report("usage", str(error))
    except (CheckFailed, OSError) as error:
        report("error", str(error))
