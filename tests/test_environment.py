# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""environment.sh with a stand-in interpreter: nothing is downloaded, every decision is seen."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT

# A Python that writes down what it is asked; `-m venv` copies it into the new environment, as a link does.
INTERPRETER = """#!/bin/bash
case "$*" in
    *version_info*)
        home=$(dirname "$(readlink -f "$0")")
        [ ! -f "$home/home" ] || home=$(cat "$home/home")
        echo "${FAKE_VERSION:-3.11} $home" ;;
    *"-m venv"*)
        echo venv >>"$FAKE_LOG"
        mkdir -p "${!#}/bin"
        cp "$0" "${!#}/bin/python"
        dirname "$(readlink -f "$0")" >"${!#}/bin/home" ;;
    *"pip install"*) echo "install ${!###*/}" >>"$FAKE_LOG"; [ -z "$FAKE_FAIL" ] ;;
    *) echo "run $*" ;;
esac
"""


@pytest.fixture
def kit(tmp_path):
    folder = tmp_path / "a folder with spaces"
    (folder / "sam3_utils").mkdir(parents=True)
    for name in ("run_tests.sh", "requirements.txt", "requirements-dev.txt", "sam3_utils/environment.sh"):
        shutil.copy(ROOT / name, folder / name)
    (tmp_path / "python").write_text(INTERPRETER)
    (tmp_path / "python").chmod(0o755)
    return folder


def run(kit, **env):
    log = kit.parent / "log"
    log.write_text("")
    variables = {"PATH": os.environ["PATH"], "FAKE_LOG": str(log), "PYTHON": str(kit.parent / "python")} | env
    variables = {name: value for name, value in variables.items() if value is not None}
    result = subprocess.run(
        ["bash", str(kit / "run_tests.sh"), "-k", "x y"], capture_output=True, text=True, cwd="/", env=variables
    )
    return result, log.read_text().split("\n")[:-1]


def test_the_first_run_installs_and_the_second_only_starts(kit):
    result, done = run(kit)
    assert result.returncode == 0, result.stderr
    assert done == ["venv", "install requirements.txt", "install requirements-dev.txt"]
    assert result.stdout.splitlines() == [
        "run -m ruff check --no-cache .", "run -m pytest -q -n 2 --dist loadfile -k x y",
    ]  # fmt: skip
    for python in (str(kit.parent / "python"), None):
        result, done = run(kit, PYTHON=python)
        assert result.returncode == 0 and done == []


def test_changed_requirements_are_installed_again(kit):
    run(kit)
    (kit / "requirements-dev.txt").write_text("pytest==9.9\n")
    assert run(kit)[1] == ["install requirements-dev.txt"]


def test_an_interrupted_installation_is_taken_up_again(kit):
    result, _ = run(kit, FAKE_FAIL="1")
    assert result.returncode == 2 and "could not install requirements.txt" in result.stderr
    assert run(kit)[1] == ["install requirements.txt", "install requirements-dev.txt"]


def test_another_interpreter_makes_a_new_environment(kit):
    run(kit)
    other = kit.parent / "other"
    other.mkdir()
    shutil.copy(kit.parent / "python", other / "python")
    assert run(kit, PYTHON=str(other / "python"))[1][0] == "venv"


def test_an_environment_made_by_hand_is_kept(kit):
    (kit / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(kit.parent / "python", kit / ".venv" / "bin" / "python")
    result, done = run(kit, PYTHON=None)
    assert result.returncode == 0, result.stderr
    assert done == ["install requirements.txt", "install requirements-dev.txt"]


@pytest.mark.parametrize("python, version", [("python", "3.12"), ("python", "3.9"), ("missing", "no Python")])
def test_a_wrong_python_is_named_at_once(kit, python, version):
    path = str(kit.parent / python)
    result, done = run(kit, PYTHON=path, FAKE_VERSION=version)
    assert result.returncode == 2 and done == []
    assert f"Python 3.11 is needed, {path} is {version}" in result.stderr and "PYTHON=" in result.stderr
    assert not (kit / ".venv").exists()
