# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""run_units with workers that only sleep, write, hang up or die: every unit is done once, or given up by name."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.workers import MAX_DEATHS, run_units


@dataclass(frozen=True)
class Unit:
    key: int


def work(device: str, settings: dict, receive, report) -> None:
    """Write a line a unit; `device` says how fast, `settings` what goes wrong."""
    if device == "refused":
        raise UsageError("--device refused: no such device")
    if device == "broken":
        raise CheckFailed("the model gave NaN")
    if device == "dies at start":
        os.kill(os.getpid(), signal.SIGKILL)
    report("ready", device)
    for unit in receive():
        if unit is None:
            continue
        if unit.key == settings.get("poison"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(device))
        with open(settings["folder"] / str(os.getpid()), "a") as stream:
            stream.write(f"{unit.key}\n")
        report("progress", unit.key)
        report("done")


def run(tmp_path: Path, devices: list[str], count: int = 20, **settings):
    """Run `count` units; returns the units given up, what was reported, and each worker's units."""
    reported = []

    def written() -> dict[str, list[int]]:
        return {path.name: [int(line) for line in path.read_text().split()] for path in tmp_path.iterdir()}

    given_up = run_units(
        lambda facts: [Unit(key) for key in range(count)], devices, work, {"folder": tmp_path, **settings},
        reported.append, lambda unit: None if any(unit.key in keys for keys in written().values()) else unit,
    )  # fmt: skip
    return given_up, sorted(reported), list(written().values())


def test_every_unit_is_done_once_and_a_slow_device_holds_nobody_up(tmp_path):
    given_up, reported, written = run(tmp_path, ["0.01", "0.2"])
    assert given_up == [] and reported == list(range(20))
    assert sorted(key for keys in written for key in keys) == list(range(20))
    slow, fast = sorted(written, key=len)
    assert len(slow) <= 5 < 15 <= len(fast)


def test_a_unit_that_kills_its_workers_is_given_up_and_the_others_are_done(tmp_path, caplog):
    given_up, reported, _ = run(tmp_path, ["0.01"] * (MAX_DEATHS + 1), poison=7)
    assert [unit.key for unit in given_up] == [7]
    assert reported == [key for key in range(20) if key != 7]
    assert caplog.text.count("its worker died (exit code -9)") == MAX_DEATHS


def test_a_worker_that_dies_while_loading_leaves_its_share_to_the_others(tmp_path, caplog):
    given_up, reported, _ = run(tmp_path, ["dies at start", "0.01"])
    assert given_up == [] and reported == list(range(20))
    assert "device dies at start: its worker died" in caplog.text


def test_when_all_die_the_run_fails_in_words(tmp_path):
    with pytest.raises(CheckFailed, match="every worker has died"):
        run(tmp_path, ["dies at start"] * 2)


def test_a_device_that_is_refused_ends_the_run_as_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="--device refused"):
        run(tmp_path, ["0.01", "refused"])


def test_an_error_that_others_would_meet_too_ends_the_run(tmp_path):
    with pytest.raises(CheckFailed, match="device broken: the model gave NaN"):
        run(tmp_path, ["0.01", "broken"], count=2000)
