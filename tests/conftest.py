# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Paths, the small demo set and the exported tiny model that several tests share; scripts run as users run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny_sam3"
STANDINS = ROOT / "tests" / "standins"
SHARED = ROOT.parent / "shared"  # sample data for checks; tests that use it skip where it is not
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

sys.path[:0] = [str(TINY), str(STANDINS)]


def run_script(name: str, *args, env: dict | None = None, cwd=None, timeout: int = 300) -> subprocess.CompletedProcess:
    """Run one of the kit's scripts in a process of its own; output is captured as text."""
    return subprocess.run(
        [sys.executable, str(ROOT / name), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(STANDINS), **(env or {})},
    )


def error_line(result: subprocess.CompletedProcess) -> str:
    """The one-line error of a refused run; fails if there is a traceback or the exit code is not 2."""
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory) -> Path:
    """A COCO root with 12 drawn pictures: 36 samples, and as many absent phrases."""
    from make_demo_data import make

    folder = tmp_path_factory.mktemp("demo") / "coco2017"
    make(folder, pictures=12, phrases=3, seed=1)
    return folder


def export_tiny(folder: Path, *options, device: str = "300I") -> Path:
    """The tiny checkpoint exported into a new folder; returns it."""
    result = run_script(
        "sam3_export_onnx.py", "--target_device", device, "--model_path", TINY, "--output_dir", folder, *options
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> dict[str, Path]:
    """The tiny checkpoint exported and verified for both target devices: device -> folder."""
    root = tmp_path_factory.mktemp("onnx")
    return {device: export_tiny(root / f"sam3_onnx_{device}", device=device) for device in ("300I", "800I")}


@pytest.fixture(scope="session")
def exported_split(tmp_path_factory) -> dict[str, Path]:
    """The tiny checkpoint in the split layout for both target devices: device -> folder."""
    root, options = tmp_path_factory.mktemp("split"), ("--layout", "split", "--verify", "never")
    return {device: export_tiny(root / f"sam3_onnx_{device}", *options, device=device) for device in ("300I", "800I")}


@pytest.fixture(scope="session")
def onnx_path(exported) -> Path:
    return exported["300I"] / "sam3.onnx"


@pytest.fixture(scope="session")
def processor():
    from sam3_utils.checkpoint import load_processor

    return load_processor(TINY)
