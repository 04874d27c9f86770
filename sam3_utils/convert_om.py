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

Reads:  ./sam3_onnx_${TARGET_DEVICE}/: sam3.onnx with its weights, keep_dtype.cfg, export_report.json; of a split
        export its graphs, their lists and split.json
Writes: ./sam3_om/sam3_${TARGET_DEVICE}_bs${BATCH_SIZE}.om, or with ATC's ending _linux_<arch> before .om;
        beside it <name>.manifest.json, and sam3_${TARGET_DEVICE}_bs${BATCH_SIZE}.log with all that ATC said (of a
        failed run: .failed.log); of a split export sam3_vision_${TARGET_DEVICE}_bs1 and sam3_text_..._bs1 once (what
        is there from the same files by the same command and CANN is kept, also with --overwrite),
        sam3_detector_${TARGET_DEVICE}_bs${BATCH_SIZE}, and sam3_split_${TARGET_DEVICE}_bs${BATCH_SIZE}.json, which
        --model_path takes for the three
Exit:   0 all batch sizes compiled, 1 ATC failed, 2 wrong usage.
"""

import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sam3_utils import atc, files
from sam3_utils.atc_run import check_outcome, exclusive, run_atc
from sam3_utils.cli import CheckFailed, UsageError, make_parser, run

logger = logging.getLogger("sam3_convert_om")
KIT = Path(__file__).resolve().parent.parent
OUTPUT = Path("sam3_om")


@dataclass(frozen=True)
class Job:
    """One OM to compile: its name without ending, the graph, the batch, ATC's command line and its keep list."""

    name: str
    part: str
    onnx_path: Path
    batch: int
    command: list[str]
    keep_list: Path | None


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
        help="nodes that keep their ONNX type, one a line; none: no list; not given: the list beside each graph",
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
    if not re.fullmatch(r" *[1-9]\d{0,3}( +[1-9]\d{0,3})* *", batches, re.ASCII):
        given = " ".join(batches[:40].split()) or "not set"
        faults.append(f"BATCH_SIZE is {given}, export a whole number or several, such as 4 or '1 4 8'")
    family = atc.SOC_FAMILY.get(target, "Ascend")
    well_formed = re.fullmatch(r"Ascend\d+[A-Z]\w*(-\d+)?", soc, re.ASCII)
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
        UsageError: it is not an export's report, or speaks of another device, of int8 weights or of a failed check.
    """
    path = onnx_path.with_name("export_report.json")
    if not path.is_file():
        logger.warning("%s is missing, the manifest will not say where the graph comes from", path)
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); {atc.EXPORT_AGAIN}") from None
    if not isinstance(report, dict):
        raise UsageError(f"{path}: not an export's report; {atc.EXPORT_AGAIN}")
    failure = (report.get("verification") or {}).get("error")
    if failure:
        raise UsageError(f"{path}: the export was not verified: {failure}; {atc.EXPORT_AGAIN}")
    if report.get("weights") == "int8":
        raise UsageError(
            f"{path}: exported with --weights int8, which ATC does not take; export with float32 or float16"
        )
    if report.get("target_device") != target:
        raise UsageError(
            f"{path}: exported for {report.get('target_device')}, TARGET_DEVICE is {target}; {atc.EXPORT_AGAIN}"
        )
    return report


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


def find_graphs(target: str) -> dict[str, Path]:
    """part -> ONNX file of the export for this device: {"single": ...}, or the parts of a split model.

    Raises:
        UsageError: there is no export, or two.
    """
    from sam3_utils.backends import SPLIT_MANIFEST, split_parts

    folder = Path(f"sam3_onnx_{target}")
    single, split = folder / "sam3.onnx", folder / SPLIT_MANIFEST
    if single.is_file() and split.is_file():
        raise UsageError(f"{folder}: holds two exports, {single.name} and {split.name}; remove one")
    if split.is_file():
        return split_parts(folder)
    if not single.is_file():
        raise UsageError(
            f"{single}: no such file below {Path.cwd()}; python3 sam3_export_onnx.py --target_device {target} "
            f"--model_path ./sam3_model --output_dir ./{folder}"
        )
    return {"single": single}


def fusion_switch(target: str) -> Path | None:
    """The file that turns fusions off, for every device but 300I."""
    return None if target == "300I" else KIT / "fusion_switch.cfg"


def plan(graphs: dict[str, Path], args, target: str, batches: list[int], soc: str, precision: tuple) -> list[Job]:
    """What to compile: the single graph or the detector for each batch, the other parts once for a batch of 1.

    Raises:
        UsageError: ATC would refuse a graph, or something that goes with it.
    """
    from sam3_utils.contract import STEMS
    from sam3_utils.preflight import check_model

    if len(graphs) > 1 and args.keep_dtype not in (None, "none"):
        raise UsageError(
            f"--keep_dtype {args.keep_dtype}: a split model has a list for each graph; edit "
            f"{atc.keep_list_path(graphs['vision'])} and its neighbours"
        )
    jobs = []
    for part, path in sorted(graphs.items(), key=lambda item: item[0] == "detector"):  # which needs the others
        model = check_model(path, part)
        keep_list = atc.choose_keep_list(args.keep_dtype, path, model, precision[1], soc)
        for batch in batches if part in ("single", "detector") else [1]:
            name = f"{STEMS[part]}_{target}_bs{batch}"
            command = atc.command_line(
                path, OUTPUT / ".converting" / name, atc.input_shape(model, batch, path),
                soc, precision, keep_list, fusion_switch(target),
            )  # fmt: skip
            jobs.append(Job(name, part, path, batch, command, keep_list))
    return jobs


def is_made(job: Job, facts: dict) -> bool:
    """Is the OM of a part that all batch sizes share there, from the same files by the same command and CANN?

    Args:
        facts: what the manifest of a new one would say. The command alone names lists whose content may have changed.
    """

    def source(manifest):
        lists = (manifest[name] and manifest[name]["sha256"] for name in ("keep_dtype", "fusion_switch"))
        return manifest["command"], manifest["onnx"]["sha256"], *lists, manifest["versions"]["cann"]

    for om in existing(job.name):
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(om.with_suffix(".manifest.json").read_text(encoding="utf-8"))
            if source(manifest) == source(facts) and manifest["om"]["sha256"] == files.sha256(om):
                return True
    return False


def split_manifest(target: str, batch: int | str) -> Path:
    """The file that stands for a split model of OMs."""
    return OUTPUT / f"sam3_split_{target}_bs{batch}.json"


def write_split_manifest(jobs: list[Job], target: str, batch: int) -> None:
    """Name the OMs of a split model with this batch of phrases in a file that stands for them."""
    path = split_manifest(target, batch)
    used = [job for job in jobs if job.part != "detector" or job.batch == batch]
    files.write_json(path, {job.part: existing(job.name)[0].name for job in used})
    print(f"{path}: the model of {len(used)} files, for --model_path", flush=True)


def convert(name: str, facts: dict, lock) -> None:
    """Compile one OM by the command in `facts` and write its manifest.

    Args:
        name: the OM's name without ending.
        facts: what the manifest says beside ATC's warnings, the time and the OM itself.

    Raises:
        CheckFailed: ATC failed.
    """
    # Not yet the log's final name: if ATC fails, an OM that is there keeps the log that belongs to it.
    log_path, folder = OUTPUT / f"{name}.failed.log", OUTPUT / ".converting"
    started, clock = datetime.now(UTC), time.perf_counter()
    logger.info("%s: ATC starts, which may take long; its output goes to %s too", name, OUTPUT / f"{name}.log")
    code, output = run_atc(facts["command"], folder, log_path, lock)
    written = check_outcome(code, output, folder, log_path)
    slow = list(dict.fromkeys(atc.AI_CPU.findall(output)))
    if slow:
        logger.warning("%s: %d operators run on the slow AI CPU: %s", name, len(slow), ", ".join(slow[:10]))
    if written.stem != name:
        logger.warning("%s holds host code: it runs on %s only", written.name, written.stem.removeprefix(f"{name}_"))
    seconds = time.perf_counter() - clock
    manifest = facts | {
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
    graphs = find_graphs(target)
    report = read_export_report(next(iter(graphs.values())), target)
    jobs = plan(graphs, args, target, batches, soc, precision)
    if args.dry_run:
        print("\n".join(shlex.join(job.command) for job in jobs))
        return 0
    from sam3_utils.backends import model_files
    from sam3_utils.report import versions

    sources = {part: model_files(path) for part, path in graphs.items()}
    for text in host_warnings(soc, max(sum(path.stat().st_size for path in paths) for paths in sources.values())):
        logger.warning("%s", text)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # under nohup it is ignored, and stays so
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))  # a lost connection would leave ATC behind
    if OUTPUT.is_symlink() and not OUTPUT.exists():
        raise UsageError(f"{OUTPUT}: a link to nothing ({OUTPUT.readlink()}); remove it, or make what it names")
    OUTPUT.mkdir(mode=0o750, exist_ok=True)
    with exclusive(OUTPUT) as lock:
        hashes = {part: {path.name: files.sha256(path) for path in paths} for part, paths in sources.items()}
        told = (report or {}).get("sha256", {})
        if report and any(told.get(name) != digest for graph in hashes.values() for name, digest in graph.items()):
            logger.warning("export_report.json speaks of another graph, the manifest will not repeat it")
            report = None
        switch = fusion_switch(target)
        facts = {
            "export": report,
            "target_device": target,
            "soc_version": soc,
            "precision": dict([precision]),
            "fusion_switch": switch and {"path": str(switch), "sha256": files.sha256(switch)},
            "versions": versions() | {"cann": cann_version()},
        }
        facts_of = {
            job.name: facts
            | {
                "command": job.command,
                "onnx": {"path": str(job.onnx_path), "sha256": hashes[job.part]},
                "keep_dtype": job.keep_list and {"path": str(job.keep_list), "sha256": files.sha256(job.keep_list)},
                "batch_size": job.batch,
            }
            for job in jobs
        }
        shared = [job for job in jobs if job.part not in ("single", "detector")]
        # Also with --overwrite: compiled again they would be the same, and the other batch sizes would lose theirs. A
        # detector that stands for no model was left by a conversion that was stopped after it.
        made = [
            job for job in jobs
            if (job in shared or (job.part == "detector" and not split_manifest(target, job.batch).exists()))
            and is_made(job, facts_of[job.name])
        ]  # fmt: skip
        for job in made:
            logger.info("%s: there already, from the same files by the same command", existing(job.name)[0])
        todo = [job for job in jobs if job not in made]
        present = [str(path) for job in todo for path in existing(job.name)]
        if present and not args.overwrite:
            raise UsageError(f"{', '.join(present)}: there already; --overwrite replaces, BATCH_SIZE chooses others")
        if any(job in todo for job in shared):  # no manifest may name parts of two exports
            for old in OUTPUT.glob(split_manifest(target, "*").name):
                old.unlink()
                if old not in [split_manifest(target, batch) for batch in batches]:
                    logger.warning("%s: gone, since parts of it are replaced; convert that batch size again too", old)
        done = []
        for job in todo:
            try:
                convert(job.name, facts_of[job.name], lock)
            except CheckFailed as error:
                raise CheckFailed(f"{error}. Compiled before it: {', '.join(done) or 'none'}") from None
            done.append(job.name)
            if job.part == "detector":
                write_split_manifest(jobs, target, job.batch)
        for job in made:
            if job.part == "detector":
                write_split_manifest(jobs, target, job.batch)
    return 0


if __name__ == "__main__":
    sys.argv[0] = "sam3_convert_om.sh"  # what the user called
    run(main)
