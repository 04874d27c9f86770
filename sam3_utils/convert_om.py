# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Compile the exported SAM3 graph into OM files of a fixed batch with ATC.

Example:
    export TARGET_DEVICE=300I BATCH_SIZE="1 4 8" SOC_VERSION=Ascend310P3
    bash sam3_convert_om.sh

Environment:
    TARGET_DEVICE  300I (Atlas 300V PRO) or 800I (Atlas 800I A2)
    BATCH_SIZE     the OM's batch; several, separated by spaces, are compiled one after the other
    SOC_VERSION    Ascend and the name that `npu-smi info` shows, such as Ascend310P3 or Ascend910B4

Reads:  ./sam3_onnx_${TARGET_DEVICE}/: sam3.onnx with its weights, keep_dtype.cfg, export_report.json
Writes: ./sam3_om/sam3_${TARGET_DEVICE}_bs${BATCH_SIZE}.om, or with ATC's ending _linux_<arch> before .om;
        beside it <name>.manifest.json, and sam3_${TARGET_DEVICE}_bs${BATCH_SIZE}.log with all that ATC said (of a
        failed run: .failed.log)
Exit:   0 all batch sizes compiled, 1 ATC failed, 2 wrong usage.
"""

import fcntl
import json
import logging
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from sam3_utils import atc, files
from sam3_utils.cli import CheckFailed, UsageError, make_parser, run

logger = logging.getLogger("sam3_convert_om")
KIT = Path(__file__).resolve().parent.parent
OUTPUT = Path("sam3_om")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--precision_mode_v2", choices=atc.MODES_V2, default="fp16", metavar="MODE",
        help=f"ATC's precision mode, {', '.join(atc.MODES_V2)}; accuracy falls from origin over mixed_float16 to fp16, "
        "speed rises",
    )  # fmt: skip
    modes.add_argument(
        "--precision_mode", choices=atc.MODES, metavar="MODE",
        help=f"the older spelling, for the modes that only it has: {', '.join(atc.MODES)}",
    )  # fmt: skip
    parser.add_argument(
        "--keep_dtype", metavar="FILE",
        help="nodes that keep their ONNX type, one a line; none: no list; not given: keep_dtype.cfg beside sam3.onnx",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an OM that is already there")
    parser.add_argument("--dry_run", action="store_true", help="print ATC's command line and do nothing; needs no ATC")
    return parser.parse_args(argv)


def npu_names() -> list[str]:
    """The chips of this machine as `--soc_version` wants them; empty without npu-smi or without an NPU."""
    try:
        table = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({f"Ascend{name}" for name in re.findall(r"^\|\s*\d+\s+(\d+[A-Z][\w-]*)\s*\|", table, re.MULTILINE)})


def read_environment(environ: Mapping[str, str]) -> tuple[str, list[int], str]:
    """TARGET_DEVICE, BATCH_SIZE and SOC_VERSION.

    Raises:
        UsageError: one is missing or malformed, or the chip is not the device's; all faults in one line.
    """
    target, batches, soc = (environ.get(name, "") for name in ("TARGET_DEVICE", "BATCH_SIZE", "SOC_VERSION"))
    faults = []
    if target not in atc.SOC_FAMILY:
        faults.append(f"TARGET_DEVICE is {target or 'not set'}, export 300I (Atlas 300V PRO) or 800I (Atlas 800I A2)")
    if not re.fullmatch(r" *[1-9]\d*( +[1-9]\d*)* *", batches):
        faults.append(f"BATCH_SIZE is {batches or 'not set'}, export a whole number or several, such as 4 or '1 4 8'")
    family = atc.SOC_FAMILY.get(target, "Ascend")
    well_formed = re.fullmatch(r"Ascend\d+[A-Z]\w*(-\d+)?", soc)
    if not well_formed or not soc.startswith(family):
        shown = " and ".join(npu_names())
        usual = "usually Ascend310P3 on Atlas 300V PRO, Ascend910B4 on Atlas 800I A2"
        wrong = f"is {soc or 'not set'}, export Ascend and the chip's name"
        if well_formed:
            wrong = f"is {soc}, but TARGET_DEVICE {target} has an {family} chip, change one of them"
        faults.append(f"SOC_VERSION {wrong} ({f'npu-smi info shows {shown}' if shown else usual})")
    if faults:
        raise UsageError("; ".join(faults))
    return target, list(dict.fromkeys(map(int, batches.split()))), soc


def host_warnings(soc: str, weight_bytes: int) -> list[str]:
    """What may make ATC fail or crawl on this machine, one line each."""
    found = []
    operators = os.environ.get("ASCEND_OPP_PATH")
    family = re.match(r"Ascend\d+[A-Z]", soc)[0].lower()
    if not operators:
        found.append(f"ASCEND_OPP_PATH is not set; {atc.SET_ENV}")
    elif not (Path(operators) / "built-in/op_impl/ai_core/tbe/config" / family).is_dir():
        found.append(f"{operators} holds no operators of {family}; from CANN 8.5.0 on their package must be installed")
    memory = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    # An estimate: the graph in float32, its float16 form, and copies while constants are folded and the OM is written.
    if memory and int(memory[1]) * 1024 < 4 * weight_bytes:
        found.append(f"{int(memory[1]) / 2**20:.1f} GiB of memory is free; ATC may need {4 * weight_bytes / 2**30:.1f}")
    if shutil.disk_usage(".").free < weight_bytes:
        found.append(f"{shutil.disk_usage('.').free / 2**30:.1f} GiB of disk is free; the OM may need more")
    # ATC starts 8 compilers unless told otherwise, and its manual advises at most 80 % of the cores.
    if (os.cpu_count() or 1) < 8 and "TE_PARALLEL_COMPILER" not in os.environ:
        found.append(f"{os.cpu_count()} cores for ATC's 8 compilers; export TE_PARALLEL_COMPILER with a smaller number")
    if platform.machine() not in ("x86_64", "aarch64"):
        found.append(f"CANN exists for x86_64 and aarch64, this machine is {platform.machine()}")
    here = npu_names()
    if here and soc not in here:
        found.append(f"SOC_VERSION is {soc}, this machine has {' and '.join(here)}; the OM will not run here")
    return found


def cann_version() -> str:
    """The toolkit's version, from the file that its installer writes; "unknown" where set_env.sh was not sourced."""
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        for path in sorted(Path(os.environ.get(name, "/nonexistent")).glob("*-linux/ascend_toolkit_install.info")):
            found = re.search(r"^version=(.+)$", path.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found[1].strip()
    return "unknown"


def read_export_report(onnx_path: Path, target: str) -> dict | None:
    """What the export says of the graph; None, with a warning, where the report is missing.

    Raises:
        UsageError: it is not JSON, or the graph was exported for another device.
    """
    path = onnx_path.with_name("export_report.json")
    if not path.is_file():
        logger.warning("%s is missing, the manifest will not say where the graph comes from", path)
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); {atc.EXPORT_AGAIN}") from None
    if report.get("target_device") != target:
        raise UsageError(
            f"{path}: exported for {report.get('target_device')}, TARGET_DEVICE is {target}; {atc.EXPORT_AGAIN}"
        )
    return report


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


def existing(name: str) -> list[Path]:
    """The OM files of that name, with and without ATC's ending for the host."""
    return [*OUTPUT.glob(f"{name}.om"), *OUTPUT.glob(f"{name}_linux_*.om")]


def install(written: Path, name: str, manifest: dict) -> Path:
    """Put an OM and its manifest into place; returns the OM's path. A manifest never stands beside another OM."""
    om = OUTPUT / written.name
    for old in existing(name):
        old.with_suffix(".manifest.json").unlink(missing_ok=True)
    written.chmod(0o640)  # ais_bench refuses a model that the group may write
    written.replace(om)
    for old in existing(name):
        if old != om:  # the same batch under ATC's other name
            old.unlink()
    files.write_json(om.with_suffix(".manifest.json"), manifest)
    return om


def convert(name: str, command: list[str], facts: dict, lock) -> None:
    """Compile one batch size and write its manifest.

    Args:
        name: the OM's name without ending.
        facts: what the manifest says beside the command, ATC's warnings, the time and the OM itself.

    Raises:
        CheckFailed: ATC failed.
    """
    # Not yet the log's final name: if ATC fails, an OM that is there keeps the log that belongs to it.
    log_path, folder = OUTPUT / f"{name}.failed.log", OUTPUT / ".converting"
    started, clock = datetime.now(UTC), time.perf_counter()
    logger.info("%s: ATC starts, which may take long; its output goes to %s too", name, OUTPUT / f"{name}.log")
    code, output = run_atc(command, folder, log_path, lock)
    written = check_outcome(code, output, folder, log_path)
    slow = list(dict.fromkeys(atc.AI_CPU.findall(output)))
    if slow:
        logger.warning("%s: %d operators run on the slow AI CPU: %s", name, len(slow), ", ".join(slow[:10]))
    if written.stem != name:
        logger.warning("%s holds host code: it runs on %s only", written.name, written.stem.removeprefix(f"{name}_"))
    seconds = time.perf_counter() - clock
    manifest = facts | {
        "command": command,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "om": {"name": written.name, "sha256": files.sha256(written), "bytes": written.stat().st_size},
        "ai_cpu_operators": slow,
    }
    om = install(written, name, manifest)
    log_path.replace(OUTPUT / f"{name}.log")
    print(f"{om}: {manifest['om']['bytes'] / 1e6:.1f} MB, {seconds:.0f} s", flush=True)


def main(argv=None) -> int:
    args = parse_args(argv)
    target, batches, soc = read_environment(os.environ)
    precision = atc.choose_precision(args, soc)
    if not args.dry_run and not shutil.which("atc"):
        raise UsageError(f"atc is not on PATH; {atc.SET_ENV}")
    onnx_path = Path(f"sam3_onnx_{target}") / "sam3.onnx"
    if not onnx_path.is_file():
        raise UsageError(
            f"{onnx_path}: no such file below {Path.cwd()}; python3 sam3_export_onnx.py --target_device {target} "
            f"--model_path ./sam3_model --output_dir ./{onnx_path.parent}"
        )
    from sam3_utils.preflight import check_model

    model, report = check_model(onnx_path), read_export_report(onnx_path, target)
    keep_list = atc.choose_keep_list(args.keep_dtype, onnx_path, model, precision[1], soc)
    fusion_switch = None if target == "300I" else KIT / "fusion_switch.cfg"
    names = {batch: f"sam3_{target}_bs{batch}" for batch in batches}
    commands = {
        name: atc.command_line(
            onnx_path, OUTPUT / ".converting" / name, atc.input_shape(model, batch, onnx_path),
            soc, precision, keep_list, fusion_switch,
        )
        for batch, name in names.items()
    }  # fmt: skip
    if args.dry_run:
        print("\n".join(map(shlex.join, commands.values())))
        return 0
    from sam3_utils.backends import model_files
    from sam3_utils.report import versions

    parts = model_files(onnx_path)
    for text in host_warnings(soc, sum(path.stat().st_size for path in parts)):
        logger.warning("%s", text)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # under nohup it is ignored, and stays so
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))  # a lost connection would leave ATC behind
    OUTPUT.mkdir(mode=0o750, exist_ok=True)
    with exclusive(OUTPUT) as lock:
        present = [str(path) for name in commands for path in existing(name)]
        if present and not args.overwrite:
            raise UsageError(f"{', '.join(present)}: there already; --overwrite replaces, BATCH_SIZE chooses others")
        facts = {
            "onnx": {"path": str(onnx_path), "sha256": {path.name: files.sha256(path) for path in parts}},
            "export": report,
            "target_device": target,
            "soc_version": soc,
            "precision": dict([precision]),
            "keep_dtype": keep_list and {"path": str(keep_list), "sha256": files.sha256(keep_list)},
            "fusion_switch": fusion_switch and {"path": str(fusion_switch), "sha256": files.sha256(fusion_switch)},
            "versions": versions() | {"cann": cann_version()},
        }
        done = []
        for batch, name in names.items():
            try:
                convert(name, commands[name], facts | {"batch_size": batch}, lock)
            except CheckFailed as error:
                raise CheckFailed(f"{error}. Compiled before it: {', '.join(done) or 'none'}") from None
            done.append(name)
    return 0


if __name__ == "__main__":
    sys.argv[0] = "sam3_convert_om.sh"  # what the user called
    run(main)
