# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where a run's time and memory go: what the summary of a run and sam3_benchmark.py say of it."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_lock = threading.Lock()
_seconds: dict[str, float] = defaultdict(float)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add what the block takes to the seconds of `name`, such as "decode"."""
    started = time.perf_counter()
    try:
        yield
    finally:
        with _lock:
            _seconds[name] += time.perf_counter() - started


def seconds_by_stage() -> dict[str, float]:
    """Seconds of each stage since the process started. Pictures are decoded and prepared in threads while the model
    computes, so that the sum may exceed the wall time."""
    return dict(_seconds)


def peak_memory_mib() -> int:
    """The most memory this process has held at once, mapped files included, in MiB: VmHWM on Linux, the peak working
    set on Windows, elsewhere what is held now."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) // 1024
    import psutil

    info = psutil.Process().memory_info()
    return getattr(info, "peak_wset", info.rss) // 2**20
