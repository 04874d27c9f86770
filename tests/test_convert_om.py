# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_convert_om.sh as a user runs it, against a stand-in for ATC that refuses what the real one refuses."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from conftest import ROOT, STANDINS, TINY, error_line, run_script

from sam3_utils import atc, atc_run, convert_om
from sam3_utils.cli import CheckFailed
from sam3_utils.files import sha256

SOC = {"300I": "Ascend310P3", "800I": "Ascend910B4"}
NPU_SMI = """#!/bin/sh
cat <<'END'
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           49                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1448 / 44278                            |
+===============================+=================+======================================================+
END
"""


def variables(device="300I", batches="4", soc=None, **more) -> dict[str, str]:
    """The environment of a user: this Python and the stand-in ATC first on PATH, and the guide's three variables."""
    path = os.pathsep.join((str(Path(sys.executable).parent), str(STANDINS), "/usr/bin", "/bin"))
    guide = {"TARGET_DEVICE": device, "BATCH_SIZE": batches, "SOC_VERSION": soc or SOC.get(device, "Ascend310P3")}
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_", "PYTHONPATH"))}
    return rest | {"PATH": path} | guide | more


def convert(folder, *arguments, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "sam3_convert_om.sh"), *arguments],
        cwd=folder, env=variables(**settings), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def start(folder, pids, **settings) -> tuple[subprocess.Popen, list[int]]:
    """A conversion whose ATC never ends, once that is at work: the script, and the processes of ATC."""
    process = subprocess.Popen(
        ["bash", str(ROOT / "sam3_convert_om.sh"), "--overwrite"], cwd=folder, text=True,
        env=variables(ATC_STANDIN="hang", ATC_STANDIN_PIDS=str(pids), **settings),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (pids.is_file() and len(pids.read_text().split()) == 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process, [int(number) for number in pids.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.05)


def failure(result: subprocess.CompletedProcess) -> str:
    """The one-line error of a conversion that failed; no traceback, exit code 1."""
    assert result.returncode == 1, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


def listing(folder) -> list[str]:
    return sorted(path.name for path in (folder / "sam3_om").iterdir() if path.name != ".lock")


@pytest.fixture
def kit(tmp_path, exported):
    """A folder as it is after both exports."""
    for device, folder in exported.items():
        shutil.copytree(folder, tmp_path / f"sam3_onnx_{device}")
    return tmp_path


@pytest.fixture(scope="module")
def converted(tmp_path_factory, exported):
    """One conversion for 800I at batch 4 that went well, for the tests that only look at it."""
    folder = tmp_path_factory.mktemp("converted")
    shutil.copytree(exported["800I"], folder / "sam3_onnx_800I")
    return folder, convert(folder, device="800I")


# The command line


@pytest.mark.parametrize("batch", (1, 4, 8))
@pytest.mark.parametrize("device", ("300I", "800I"))
def test_the_command_line_word_by_word(kit, device, batch):
    expected = (
        f"atc --framework=5 --model={kit}/sam3_onnx_{device}/sam3.onnx "
        f"--output={kit}/sam3_om/.converting/sam3_{device}_bs{batch} "
        f"'--input_shape=pixel_values:{batch},3,224,224;input_ids:{batch},32;attention_mask:{batch},32' "
        f"--soc_version={SOC[device]} --precision_mode_v2=fp16 "
        f"--keep_dtype={kit}/sam3_onnx_{device}/keep_dtype.cfg "
        + ("" if device == "300I" else f"--fusion_switch_file={ROOT}/fusion_switch.cfg ")
        + "--op_compiler_cache_mode=enable --log=error\n"
    )
    result = convert(kit, "--dry_run", device=device, batches=str(batch))
    assert (result.returncode, result.stdout) == (0, expected), result.stderr
    assert not (kit / "sam3_om").exists()


def test_a_dry_run_prints_one_line_for_each_batch_size_and_needs_no_atc(kit):
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    result = convert(kit, "--dry_run", batches="8 1", PATH=path)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"pixel_values:(\d+),", result.stdout) == ["8", "1"]


@pytest.mark.parametrize(
    "device, options, words",
    [
        ("800I", ("--precision_mode_v2", "origin"), ["--precision_mode_v2=origin"]),
        ("800I", ("--precision_mode", "must_keep_origin_dtype"), ["--precision_mode=must_keep_origin_dtype"]),
        ("800I", ("--precision_mode_v2", "mixed_bfloat16"), ["--precision_mode_v2=mixed_bfloat16", "--keep_dtype="]),
        ("300I", ("--precision_mode", "allow_fp32_to_fp16"), ["--precision_mode=allow_fp32_to_fp16", "--keep_dtype="]),
        ("300I", ("--precision_mode_v2", "cube_fp16in_fp32out"), ["_v2=cube_fp16in_fp32out", "--keep_dtype="]),
        ("300I", ("--keep_dtype", "none"), ["--precision_mode_v2=fp16"]),
    ],
)
def test_one_precision_mode_and_the_keep_list_only_where_it_has_effect(kit, device, options, words):
    result = convert(kit, "--dry_run", *options, device=device)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in words)
    assert result.stdout.count("--precision_mode") == 1
    assert result.stdout.count("--keep_dtype") == ("--keep_dtype=" in words)


@pytest.mark.parametrize(
    "device, options, text",
    [
        ("300I", ("--precision_mode_v2", "mixed_bfloat16"), "Ascend310P3 has no bfloat16"),
        ("300I", ("--precision_mode", "allow_mix_precision_bf16"), "Ascend310P3 has no bfloat16"),
        ("300I", ("--precision_mode_v2", "origin"), "no float32 matrix product"),
        ("300I", ("--precision_mode", "must_keep_origin_dtype"), "no float32 matrix product"),
        ("800I", ("--precision_mode_v2", "origin", "--keep_dtype", "list.cfg"), "without effect in mode origin"),
        ("800I", ("--precision_mode_v2", "fp16", "--precision_mode", "force_fp16"), "not allowed with"),
        ("800I", ("--precision_mode_v2", "cube_hif8"), "invalid choice"),
        ("800I", ("--keep_dtype", "missing.cfg"), "missing.cfg: the list of nodes that stay float32 is missing"),
    ],
)
def test_modes_that_exclude_each_other_or_the_chip_are_refused(kit, device, options, text):
    assert text in error_line(convert(kit, "--dry_run", *options, device=device))


def test_keep_lists_are_checked_against_the_graph(kit):
    path = kit / "sam3_onnx_300I" / "keep_dtype.cfg"
    good = path.read_text()
    path.write_text(good + "/no/such/node\n")
    count = len(good.split()) + 1
    assert f"1 of {count} names are no nodes" in error_line(convert(kit, "--dry_run"))
    path.write_text(good + "OpType::LayerNorm\n\n")
    assert "--keep_dtype=" in convert(kit, "--dry_run").stdout
    path.write_text("\n")
    assert "--keep_dtype=" not in convert(kit, "--dry_run").stdout
    path.unlink()
    assert "--keep_dtype none" in error_line(convert(kit, "--dry_run"))


def test_matrix_operators_in_the_keep_list_warn_on_a_chip_that_has_only_float16(kit):
    for device, warned in (("300I", True), ("800I", False)):
        nodes = onnx.load(kit / f"sam3_onnx_{device}" / "sam3.onnx", load_external_data=False).graph.node
        (kit / "list.cfg").write_text(next(node.name for node in nodes if node.op_type == "ConvTranspose"))
        result = convert(kit, "--dry_run", "--keep_dtype", "list.cfg", device=device)
        assert result.returncode == 0 and f"--keep_dtype={kit}/list.cfg" in result.stdout
        assert ("1 matrix operators stay float16" in result.stderr) == warned
        assert "stay float16" not in convert(kit, "--dry_run", device=device).stderr


# The environment


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"TARGET_DEVICE": ""}, "TARGET_DEVICE is not set"),
        ({"TARGET_DEVICE": "310P"}, "TARGET_DEVICE is 310P"),
        ({"BATCH_SIZE": ""}, "BATCH_SIZE is not set"),
        ({"BATCH_SIZE": "1,4"}, "BATCH_SIZE is 1,4"),
        ({"BATCH_SIZE": "0"}, "BATCH_SIZE is 0"),
        ({"BATCH_SIZE": "1\u0662"}, "BATCH_SIZE is 1\u0662"),  # an Arabic digit
        ({"BATCH_SIZE": "9" * 5000}, "BATCH_SIZE is 9999"),
        ({"BATCH_SIZE": "1\n4"}, "BATCH_SIZE is 1 4"),
        ({"SOC_VERSION": "Ascend310P\u0663"}, "SOC_VERSION is Ascend310P\u0663"),
        ({"BATCH_SIZE": "4 four"}, "BATCH_SIZE is 4 four"),
        ({"SOC_VERSION": ""}, "SOC_VERSION is not set"),
        ({"SOC_VERSION": "310P3"}, "SOC_VERSION is 310P3"),
        ({"SOC_VERSION": "Ascend910B4"}, "TARGET_DEVICE 300I has an Ascend310P chip"),
        ({"TARGET_DEVICE": "800I"}, "TARGET_DEVICE 800I has an Ascend910B chip"),
    ],
)
def test_a_missing_malformed_or_contradicting_variable_is_named(kit, settings, text):
    line = error_line(convert(kit, "--dry_run", **settings))
    assert line.startswith("sam3_convert_om.sh: error: ") and text in line


def test_all_variables_that_are_missing_are_named_at_once(kit):
    line = error_line(convert(kit, TARGET_DEVICE="", BATCH_SIZE="", SOC_VERSION=""))
    assert all(f"{name} is not set" in line for name in ("TARGET_DEVICE", "BATCH_SIZE", "SOC_VERSION"))
    assert "npu-smi" not in line


def test_the_chip_is_suggested_from_npu_smi_and_another_one_warned_about(kit):
    (kit / "bin").mkdir()
    (kit / "bin" / "npu-smi").write_text(NPU_SMI)
    (kit / "bin" / "npu-smi").chmod(0o755)
    path = f"{kit}/bin{os.pathsep}{variables()['PATH']}"
    assert "npu-smi info shows Ascend310P3" in error_line(convert(kit, SOC_VERSION="", PATH=path))
    result = convert(kit, device="800I", PATH=path)
    assert result.returncode == 0
    assert "SOC_VERSION is Ascend910B4, this machine has Ascend310P3" in result.stderr


def test_without_atc_the_remedy_is_named(kit):
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    line = error_line(convert(kit, PATH=path))
    assert "atc is not on PATH" in line and "set_env.sh" in line


def test_a_missing_onnx_file_names_the_export_s_command(tmp_path):
    line = error_line(convert(tmp_path))
    assert "sam3_onnx_300I/sam3.onnx" in line and "python3 sam3_export_onnx.py --target_device 300I" in line


def test_the_host_s_shortcomings_only_warn(kit):
    operators = kit / "opp"
    (operators / "built-in/op_impl/ai_core/tbe/config/ascend910b").mkdir(parents=True)
    result = convert(kit, ASCEND_OPP_PATH=str(operators))
    assert result.returncode == 0 and "holds no operators of ascend310p" in result.stderr
    result = convert(kit, device="800I", ASCEND_OPP_PATH=str(operators))
    assert result.returncode == 0 and "operators of" not in result.stderr
    found = convert_om.host_warnings("Ascend310P3", 2**60)
    assert any("of memory is free" in text for text in found) and any("of disk is free" in text for text in found)


def test_a_path_that_atc_does_not_take_is_refused_and_a_chinese_one_is_not(tmp_path, kit):
    for name in ("with space", "plus+"):
        shutil.copytree(kit / "sam3_onnx_300I", tmp_path / name / "sam3_onnx_300I")
        assert f"ATC takes no {name[4]!r} in a path" in error_line(convert(tmp_path / name, "--dry_run"))
    shutil.copytree(kit / "sam3_onnx_300I", tmp_path / "模型" / "sam3_onnx_300I")
    assert convert(tmp_path / "模型", "--dry_run").returncode == 0


def test_what_atc_would_refuse_in_the_graph_is_refused_before_it_starts(kit):
    path = kit / "sam3_onnx_300I" / "sam3.onnx"
    model = onnx.load(path, load_external_data=False)
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    path.write_bytes(model.SerializeToString())
    result = convert(kit)
    assert "ATC start working" not in result.stdout
    assert str(path.name) in error_line(result)


def test_a_graph_whose_batch_is_fixed_is_refused_for_another_batch(kit):
    path = kit / "sam3_onnx_300I" / "sam3.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    assert atc.input_shape(model, 2, path).startswith("pixel_values:2,3,224,224;")
    with pytest.raises(convert_om.UsageError, match="pixel_values is not free in the batch alone"):
        atc.input_shape(model, 4, path)


def test_a_graph_exported_for_another_device_is_refused(kit):
    shutil.rmtree(kit / "sam3_onnx_300I")
    (kit / "sam3_onnx_800I").rename(kit / "sam3_onnx_300I")
    assert "exported for 800I, TARGET_DEVICE is 300I" in error_line(convert(kit))


@pytest.mark.parametrize(
    "report, text",
    [
        ([], "not an export's report"),
        ({"target_device": "300I", "weights": "int8"}, "exported with --weights int8, which ATC does not take"),
        ({"target_device": "300I", "verification": {"error": "differs"}}, "the export was not verified: differs"),
    ],
)
def test_a_report_that_speaks_against_the_graph_is_believed(kit, report, text):
    (kit / "sam3_onnx_300I" / "export_report.json").write_text(json.dumps(report))
    assert text in error_line(convert(kit, "--dry_run"))


def test_a_report_of_another_graph_is_not_repeated_in_the_manifest(kit):
    path = kit / "sam3_onnx_300I" / "export_report.json"
    report = json.loads(path.read_text())
    report["sha256"]["sam3.onnx.data"] = "0" * 64
    path.write_text(json.dumps(report))
    result = convert(kit)
    assert result.returncode == 0 and "export_report.json speaks of another graph" in result.stderr
    assert json.loads((kit / "sam3_om" / "sam3_300I_bs4.manifest.json").read_text())["export"] is None


# A conversion that goes well


def test_a_success_leaves_the_om_its_manifest_and_the_log(converted):
    folder, result = converted
    assert result.returncode == 0, result.stderr
    assert listing(folder) == ["sam3_800I_bs4.log", "sam3_800I_bs4.manifest.json", "sam3_800I_bs4.om"]
    assert sorted(path.name for path in folder.iterdir()) == ["sam3_om", "sam3_onnx_800I"]
    assert stat.S_IMODE((folder / "sam3_om" / "sam3_800I_bs4.om").stat().st_mode) == 0o640
    log = (folder / "sam3_om" / "sam3_800I_bs4.log").read_text()
    assert log.startswith("ATC start working now") and "ATC run success" in log
    assert log in result.stdout and result.stdout.splitlines()[-1].startswith("sam3_om/sam3_800I_bs4.om: ")


def test_the_manifest_says_what_the_om_was_made_from_and_how(converted):
    folder, _ = converted
    manifest = json.loads((folder / "sam3_om" / "sam3_800I_bs4.manifest.json").read_text())
    onnx_folder, om = folder / "sam3_onnx_800I", folder / "sam3_om" / "sam3_800I_bs4.om"
    assert manifest["onnx"] == {
        "path": "sam3_onnx_800I/sam3.onnx",
        "sha256": {name: sha256(onnx_folder / name) for name in ("sam3.onnx", "sam3.onnx.data")},
    }
    assert manifest["export"] == json.loads((onnx_folder / "export_report.json").read_text())
    assert manifest["om"] == {"name": om.name, "sha256": sha256(om), "bytes": om.stat().st_size}
    dry = convert(folder, "--dry_run", device="800I").stdout.replace("'", "").split()
    assert manifest["command"] == dry
    assert manifest["keep_dtype"]["sha256"] == sha256(onnx_folder / "keep_dtype.cfg")
    assert manifest["fusion_switch"] == {
        "path": str(ROOT / "fusion_switch.cfg"), "sha256": sha256(ROOT / "fusion_switch.cfg"),
    }  # fmt: skip
    assert manifest["precision"] == {"precision_mode_v2": "fp16"} and manifest["batch_size"] == 4
    assert (manifest["target_device"], manifest["soc_version"]) == ("800I", "Ascend910B4")
    assert manifest["versions"]["cann"] == "unknown" and manifest["versions"]["python"]
    assert manifest["seconds"] > 0 and manifest["started"].endswith("+00:00")


def test_cann_s_version_is_read_where_its_installer_wrote_it(kit):
    (kit / "latest" / "aarch64-linux").mkdir(parents=True)
    (kit / "latest" / "aarch64-linux" / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100\narch=aarch64\n"
    )
    assert convert(kit, ASCEND_TOOLKIT_HOME=str(kit / "latest")).returncode == 0
    manifest = json.loads((kit / "sam3_om" / "sam3_300I_bs4.manifest.json").read_text())
    assert manifest["versions"]["cann"] == "8.5.0" and manifest["fusion_switch"] is None


def test_a_missing_export_report_only_warns(kit):
    (kit / "sam3_onnx_300I" / "export_report.json").unlink()
    result = convert(kit)
    assert result.returncode == 0 and "export_report.json is missing" in result.stderr
    assert json.loads((kit / "sam3_om" / "sam3_300I_bs4.manifest.json").read_text())["export"] is None


def test_several_batch_sizes_are_compiled_in_turn(kit):
    result = convert(kit, batches="1 8")
    assert result.returncode == 0, result.stderr
    assert [name for name in listing(kit) if name.endswith(".om")] == ["sam3_300I_bs1.om", "sam3_300I_bs8.om"]
    for batch in (1, 8):
        assert json.loads((kit / "sam3_om" / f"sam3_300I_bs{batch}.om").read_text())["batch"] == batch


def test_atc_s_ending_for_host_code_is_kept_and_replaced_with_the_rest(kit):
    result = convert(kit, ATC_STANDIN="linux_suffix")
    assert result.returncode == 0 and "it runs on linux_x86_64 only" in result.stderr
    name = "sam3_300I_bs4_linux_x86_64"
    assert listing(kit) == ["sam3_300I_bs4.log", f"{name}.manifest.json", f"{name}.om"]
    assert f"{name}.om: there already" in error_line(convert(kit))
    assert convert(kit, "--overwrite").returncode == 0
    assert listing(kit) == ["sam3_300I_bs4.log", "sam3_300I_bs4.manifest.json", "sam3_300I_bs4.om"]


def test_operators_that_fall_to_the_ai_cpu_are_counted_and_named(kit):
    result = convert(kit, ATC_STANDIN="ai_cpu")
    assert result.returncode == 0
    assert "2 operators run on the slow AI CPU: Gather_2, Slice_29" in result.stderr
    manifest = json.loads((kit / "sam3_om" / "sam3_300I_bs4.manifest.json").read_text())
    assert manifest["ai_cpu_operators"] == ["Gather_2", "Slice_29"]


def test_export_convert_and_evaluation_form_one_chain(converted, exported, demo_data, tmp_path):
    """The OM gives the Mean IoU of the graph it was made from, to 1e-6 (the batches are the same)."""
    values = {}
    for model in (exported["800I"] / "sam3.onnx", converted[0] / "sam3_om" / "sam3_800I_bs4*.om"):
        result = run_script(
            "sam3_coco_iou_eval.py", "--model_path", model, "--processor_path", TINY, "--coco_root", demo_data,
            "--batch_size", 4, "--output_dir", tmp_path / model.suffix, "--max_samples", 12,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        values[model.suffix] = json.loads((tmp_path / model.suffix / "summary.json").read_text())["value"]
    assert values[".om"] == pytest.approx(values[".onnx"], abs=1e-6) and values[".om"] > 0.2


# Conversions that fail


def test_nothing_is_overwritten_unless_asked_and_nothing_starts_before_that_is_clear(kit):
    (kit / "sam3_om").mkdir()
    om = kit / "sam3_om" / "sam3_300I_bs8.om"
    om.write_text("an older model")
    result = convert(kit, batches="1 8")
    assert "sam3_300I_bs8.om: there already" in error_line(result)
    assert "ATC start" not in result.stdout and listing(kit) == ["sam3_300I_bs8.om"]
    assert convert(kit, batches="40").returncode == 0
    assert om.read_text() == "an older model"
    result = convert(kit, "--overwrite", batches="8", ATC_STANDIN="no_file")
    assert result.returncode == 1 and om.read_text() == "an older model"


def test_a_failure_of_the_second_batch_size_keeps_the_first_and_says_so(kit):
    line = failure(convert(kit, batches="1 4 8", ATC_STANDIN="fail_at=4"))
    assert "EZ3003" in line and "not supported on this chip" in line and "sam3_om/sam3_300I_bs4.failed.log" in line
    assert line.endswith("Compiled before it: sam3_300I_bs1")
    assert [name for name in listing(kit) if "bs1" not in name] == ["sam3_300I_bs4.failed.log"]


@pytest.mark.parametrize(
    "mood, text",
    [
        ("no_file", "it reports success, but 0 OM files are there"),
        ("empty_file", "it reports success, but 0 OM files are there"),
        ("no_success", "exit code 0 without an error code"),
        ("bad_exit", "exit code 1 without an error code"),
        ("no_space", "No space left on device"),
        ("killed", "killed by SIGKILL"),
        ("say=Segmentation fault", "exit code 255 without an error code"),
        ("say=libc_sec.so: error while loading shared libraries: libascend_hal.so", "devlib"),
    ],
)
def test_a_failing_atc_leaves_no_om_and_its_log(kit, mood, text):
    line = failure(convert(kit, ATC_STANDIN=mood))
    assert text in line and "sam3_om/sam3_300I_bs4.failed.log" in line
    assert listing(kit) == ["sam3_300I_bs4.failed.log"]


def test_a_disk_that_is_full_for_the_log_ends_atc(kit):
    (kit / "sam3_om").mkdir()
    (kit / "sam3_om" / "sam3_300I_bs4.failed.log").symlink_to("/dev/full")
    assert "No space left on device" in failure(convert(kit))
    assert listing(kit) == ["sam3_300I_bs4.failed.log"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupt_ends_atc_with_all_its_processes(kit, tmp_path, number, code):
    process, pids = start(kit, tmp_path / "pids")
    assert all(map(alive, pids))
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in errors
    assert not any(map(alive, pids))
    assert listing(kit) == ["sam3_300I_bs4.failed.log"]


def test_two_runs_at_once_are_refused_also_when_only_the_killed_one_s_atc_is_left(kit, tmp_path):
    process, pids = start(kit, tmp_path / "pids")
    try:
        assert "another conversion is at work" in error_line(convert(kit, device="800I"))
        process.kill()
        process.communicate(timeout=30)
        assert "another conversion is at work" in error_line(convert(kit, device="800I"))
        assert (kit / "sam3_om" / ".converting" / "kernel_meta").is_dir()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_until_dead(pids)
    (kit / "sam3_om" / ".converting" / "sam3_300I_bs4.om").write_text("half an OM")
    assert convert(kit, device="800I").returncode == 0
    assert listing(kit) == [
        "sam3_300I_bs4.failed.log",
        *(f"sam3_800I_bs4.{end}" for end in ("log", "manifest.json", "om")),
    ]


# ATC's own refusals, and what this kit makes of them

GOOD = {"framework": "5", "soc_version": "Ascend310P3", "precision_mode_v2": "fp16", "output": "out"}


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"no_such_flag": "1"}, "unknown command line flag"),
        ({"framework": "7"}, "E10007"),
        ({"soc_version": ""}, "E10054"),
        ({"soc_version": "Ascend311"}, "E10001"),
        ({"precision_mode_v2": "float16"}, "E10001"),
        ({"model": "missing.onnx"}, "E10001"),
        ({"keep_dtype": "missing.cfg"}, "E10001"),
        ({"precision_mode": "force_fp16"}, "E10056"),
        ({"dynamic_batch_size": "1,2", "dynamic_dims": "1;2"}, "E10009"),
        ({"input_shape": "pixel_values=4,3,224,224"}, "E10002"),
        ({"input_shape": "pixel_values:0,3,224,224"}, "E10011"),
        ({"input_shape": "image:4,3,224,224"}, "E10016"),
        ({"input_shape": "pixel_values:4,3,224,224"}, "E10001"),
    ],
)
def test_the_stand_in_refuses_wrong_flags_and_the_code_is_explained(kit, changes, code):
    flags = {"model": str(kit / "sam3_onnx_300I" / "sam3.onnx")} | GOOD | changes
    check_refusal(kit, flags, code)


@pytest.mark.parametrize("change, code", [("opsets", "E16005"), ("opset 19", "E16002"), ("no weights", "E10041")])
def test_the_stand_in_refuses_wrong_models_and_the_code_is_explained(kit, change, code):
    path = kit / "sam3_onnx_300I" / "sam3.onnx"
    model = onnx.load(path, load_external_data=False)
    if change == "opsets":
        model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    elif change == "opset 19":
        model.opset_import[0].version = 19
    else:
        (path.parent / "sam3.onnx.data").unlink()
    path.write_bytes(model.SerializeToString())
    check_refusal(kit, {"model": str(path)} | GOOD, code)


def test_the_stand_in_refuses_a_keep_list_with_unknown_names(kit):
    (kit / "list.cfg").write_text("/no/such/node\n")
    shapes = "pixel_values:4,3,224,224;input_ids:4,32;attention_mask:4,32"
    flags = {"model": str(kit / "sam3_onnx_300I" / "sam3.onnx"), "keep_dtype": str(kit / "list.cfg")}
    check_refusal(kit, flags | GOOD | {"input_shape": shapes}, "E10003")


def check_refusal(folder, flags, code):
    command = [sys.executable, str(STANDINS / "atc"), *(f"--{name}={value}" for name, value in flags.items())]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 255 and "ATC run failed" in result.stdout and not list(folder.glob("out*.om"))
    first = atc.explain(result.stdout)[0]
    assert code in first and all(part in first for part in atc.ERRORS[code])


def test_every_code_is_found_with_its_line_and_an_unknown_one_too(tmp_path):
    lines = [
        "ATC start working now, please wait for a moment.",
        "ATC run failed, Please check the detail log, Try 'atc --help' for more information",
        "E19010: No parser is registered for Op [div, optype [ai.onnx::23::Div]].",
        "        Solution: 1. Check E10016: no line of its own",
        "EZ9999: [PID: 7] 2026-01-01-00:00:00.000.001 Inner Error!",
        "EZ9999: [PID: 7] 2026-01-01-00:00:00.000.001 again",
        "E77777: what is that?",
        "E10501: IR for Op [x] with optype [y] is not registered.",
    ]
    found = atc.explain("\n".join(lines))
    assert [text.split(":")[0] for text in found] == ["line 3", "line 5", "line 7"]
    assert "opset 11 to 18" in found[0] and "plog" in found[1] and "a code this kit does not know" in found[2]
    with pytest.raises(CheckFailed, match="line 3: E19010"):
        atc_run.check_outcome(255, "\n".join(lines), tmp_path, tmp_path / "x.log")


# The script itself


def test_help_names_variables_flags_and_defaults_without_heavy_libraries(tmp_path):
    result = convert(tmp_path, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0 and result.stdout.startswith("usage: sam3_convert_om.sh ")
    for word in ("TARGET_DEVICE", "BATCH_SIZE", "SOC_VERSION", "--overwrite", "(default: fp16)", "Exit:"):
        assert word in result.stdout
    loaded = re.findall(r"\| +(torch|transformers|onnx|onnxruntime|numpy|tqdm)$", result.stderr, re.MULTILINE)
    assert "argparse" in result.stderr and loaded == []


def test_the_fusion_switch_file_turns_single_fusions_off_and_never_all():
    switch = json.loads((ROOT / "fusion_switch.cfg").read_text())["Switch"]
    assert set(switch) == {"GraphFusion", "UBFusion"} and switch["GraphFusion"]
    assert all(name != "ALL" and value == "off" for group in switch.values() for name, value in group.items())
