# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Running ATC: alone in its folder, ended with all that it started, and believed only with a whole file."""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from sam3_utils import atc
from sam3_utils.cli import CheckFailed, UsageError


@contextmanager
def exclusive(folder: Path):
    """Hold the folder alone; yields the lock's file and leaves no `.converting` behind, its own or a killed run's.

    ATC inherits the lock: where a run was killed and its ATC lives on, the next run is refused instead of disturbed.

    Raises:
        UsageError: another conversion is at work there.
    """
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another conversion is at work there; wait for it, or end its atc") from None
        aside = folder / ".converting"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            yield lock
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def end_group(process: subprocess.Popen) -> None:
    """End ATC and all that it started: `atc` is a shell script, its child and that one's compilers do the work."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    with suppress(ProcessLookupError):  # nothing is left, as it should be; what is left would hold the lock
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_atc(command: list[str], folder: Path, log_path: Path, lock) -> tuple[int, str]:
    """Run ATC in `folder`, where its droppings go; what it says goes to stdout and to `log_path` as it comes.

    Returns:
        ATC's exit code (negative or over 128 for a signal) and all it said on stdout and stderr.
    """
    from tqdm import tqdm

    with open(log_path, "wb") as log, tqdm(bar_format="ATC is at work: {elapsed}", disable=None, leave=False) as clock:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=[lock.fileno()],
        )  # fmt: skip
        try:
            while True:
                clock.refresh()
                if not select.select([process.stdout], [], [], 1.0)[0]:
                    continue
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                log.write(chunk)
                log.flush()
                clock.clear()
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
            process.wait()
        finally:
            end_group(process)
            process.stdout.close()
    return process.returncode, log_path.read_text(encoding="utf-8", errors="replace")


def check_outcome(code: int, output: str, folder: Path, log_path: Path) -> Path:
    """The OM that ATC wrote, if ATC says that it succeeded and exactly one whole file is there.

    Raises:
        CheckFailed: otherwise, with the reason.
    """
    oms = [path for path in folder.glob("*.om") if path.stat().st_size]
    if code == 0 and atc.SUCCESS in output and len(oms) == 1:
        return oms[0]
    # A shell reports a child that a signal killed as 128 + its number.
    number = -code if code < 0 else code - 128
    if atc.explain(output):
        reason = "; ".join(atc.explain(output))
    elif number in signal.valid_signals():
        reason = f"killed by {signal.Signals(number).name}; if nobody did that, memory ran out: see dmesg"
    elif code == 0 and atc.SUCCESS in output:
        reason = f"it reports success, but {len(oms)} OM files are there; is the disk full?"
    else:
        reason = f"exit code {code} without an error code; {atc.PLOG}"
    raise CheckFailed(f"{log_path}: ATC failed: {reason}")
