# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The two READMEs give the same commands, every flag exists, and what needs no NPU, weights or network runs."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TRACKED, run_script

READMES = ("README.md", "README_zh.md")
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```bash\n(.*?)```\n", re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    """(what it needs, commands) of every bash block."""
    return BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


def test_both_readmes_have_the_same_commands_in_the_same_order():
    english, chinese = (blocks(name) for name in READMES)
    assert english == chinese and len(english) >= 10
    for name in READMES:
        assert (ROOT / name).read_text(encoding="utf-8").count("```bash") == len(english)


@pytest.mark.parametrize("name", READMES)
def test_a_readme_is_short_and_has_as_many_sections_and_table_rows_as_the_other(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    other = (ROOT / READMES[name == READMES[0]]).read_text(encoding="utf-8").splitlines()
    assert len(lines) < 350
    for mark in ("#", "|", "- "):
        assert sum(line.startswith(mark) for line in lines) == sum(line.startswith(mark) for line in other)


@pytest.mark.parametrize("name", READMES)
def test_every_flag_in_a_readme_s_commands_exists(name):
    for _, commands in blocks(name):
        for command in commands.replace("\\\n", " ").splitlines():
            script = re.search(r"python3 (sam3_\w+\.py|assets/\S+\.py)", command)
            if script:
                text = run_script(script[1], "--help").stdout
                for flag in re.findall(r"--\w+", command):
                    assert re.search(rf"{flag}\b", text), (script[1], flag)


def test_the_guide_s_figures_are_quoted_exactly():
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for figure in (
            "4.3706",
            "4.9664",
            "4.6780",
            "1.6882",
            "1.6860",
            "1.6441",
            "0.5505",
            "14631",
            "0.6898",
            "0.6894",
        ):
            assert figure in text, (name, figure)


def test_the_steps_that_need_no_npu_run_in_a_fresh_copy(tmp_path):
    """The commands as they stand, one shell after the other, with the variables of earlier blocks kept."""
    copy = tmp_path / "SAM3"
    for name in TRACKED:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python3").symlink_to(sys.executable)
    script = "set -eu\n" + "\n".join(commands for needs, commands in blocks(READMES[0]) if not needs)
    # The link finds its packages through its virtual environment only when that is named.
    site = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=copy, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": site},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    values = re.findall(r"^Mean IoU \((torch|onnx)\): (0\.\d{6})$", result.stdout, re.MULTILINE)
    assert [runtime for runtime, _ in values] == ["torch", "onnx"]
    assert abs(float(values[0][1]) - float(values[1][1])) <= 1e-4
    assert re.search(r"^atc --framework=5 .*--precision_mode_v2=fp16 .*--keep_dtype=", result.stdout, re.MULTILINE)
    assert "PASS\n" in result.stdout and re.search(r"^infer +1 +20 ", result.stdout, re.MULTILINE)
    assert float(values[0][1]) >= 0.80
    presence = r"phrases with an instance \((\d+\.\d)%\), \d+/\d+ absent ones without \((\d+\.\d)%\)"
    found, absent = re.findall(presence, result.stdout)[0]
    assert float(found) >= 95 and float(absent) >= 90
