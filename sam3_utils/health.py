# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, tried rather than asked for, and what to do about what does not."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from sam3_utils import checkpoint, files
from sam3_utils.cli import UsageError

KIT = Path(__file__).resolve().parent.parent
OK, NOTE, MISSING = "ok", "note", "missing"  # a note is worth knowing, a missing thing is needed
# GiB that a run on facebook/sam3 holds at most, as docs/speed.md measured them on a CPU.
NEEDS = {
    "int8, OpenVINO": 2.5, "int8, ONNX Runtime": 3.4, "float32, PyTorch": 4.7, "export": 4.7,
    "float32, ONNX Runtime": 5.5, "bfloat16, OpenVINO": 6.8,
}  # fmt: skip
DISK = 7.5  # GB of facebook/sam3's folder and one float32 export


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `remedy` says what to do unless it is `OK`."""

    level: str
    subject: str
    text: str
    remedy: str = ""


def check_python() -> list[Finding]:
    """The interpreter, and the packages against the pinned versions of requirements.txt."""
    found = platform.python_version()
    same = sys.version_info[:2] == (3, 11)
    findings = [Finding(OK if same else NOTE, "Python", found, "" if same else "the pinned packages are for 3.11")]
    for line in (KIT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([\w-]+)==(\S+)", line)
        if not match:
            continue
        name, wanted = match.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            # An Ascend host runs OMs without most of them.
            findings.append(Finding(NOTE, name, "not installed", f"pip install {name}=={wanted}"))
            continue
        if version.split("+")[0] != wanted:
            findings.append(Finding(NOTE, name, f"{version}, proven with {wanted}", f"pip install {name}=={wanted}"))
    if len(findings) == 1:
        findings.append(Finding(OK, "packages", "all as requirements.txt pins them"))
    return findings


def _import(name: str) -> tuple[object | None, str]:
    """A module, or None and the reason: a package may be there and its libraries not."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def check_torch() -> list[Finding]:
    """PyTorch and its GPUs."""
    torch, reason = _import("torch")
    if torch is None:
        return [Finding(NOTE, "PyTorch", reason, "pip install -r requirements.txt (not needed to run an OM)")]
    findings = [Finding(OK, "PyTorch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    driver = _answer(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        findings.append(Finding(OK, "CUDA", f"{names}, --device cuda:0"))
    elif driver and not torch.version.cuda:
        remedy = "this PyTorch is built for the CPU alone: pip install --force-reinstall torch==2.9.0 from pytorch.org"
        findings.append(Finding(NOTE, "CUDA", f"there is a GPU ({driver}), PyTorch cannot use it", remedy))
    elif driver:
        remedy = f"PyTorch wants CUDA {torch.version.cuda}: update the driver, see nvidia-smi"
        findings.append(Finding(NOTE, "CUDA", f"there is a GPU ({driver}), PyTorch cannot use it", remedy))
    else:
        remedy = "nothing, where there is none; otherwise install its driver until nvidia-smi shows it"
        findings.append(Finding(NOTE, "CUDA", "no NVIDIA GPU that nvidia-smi knows", remedy))
    return findings


def _answer(command: list[str]) -> str:
    """The first line that a program prints, empty where it is missing or fails."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def _tiny_graph() -> bytes:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "x"], ["y"])
    graph = helper.make_graph([node], "tiny", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def check_onnxruntime() -> list[Finding]:
    """ONNX Runtime and each provider it lists, with a session that is really made: it lists what cannot start, too."""
    runtime, reason = _import("onnxruntime")
    if runtime is None:
        return [Finding(NOTE, "ONNX Runtime", reason, "pip install -r requirements.txt (not needed to run an OM)")]
    findings, graph = [Finding(OK, "ONNX Runtime", runtime.__version__)], _tiny_graph()
    feeds = {"x": np.eye(2, dtype=np.float32)}
    for provider in runtime.get_available_providers():
        if provider == "AzureExecutionProvider":  # computes elsewhere, which nothing here does
            continue
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        try:
            session = runtime.InferenceSession(graph, options, providers=[provider])
            used = session.get_providers()[0]
            session.run(None, feeds)
        except Exception as error:
            used = f"it fails: {str(error).splitlines()[0][:120]}"
        if used == provider:
            findings.append(Finding(OK, provider, "runs"))
        else:
            remedy = "its libraries are missing or of another version; --device that names it will be refused"
            findings.append(Finding(NOTE, provider, f"listed, but {used}", remedy))
    return findings


def check_openvino() -> list[Finding]:
    """OpenVINO, and what --device auto takes on this CPU."""
    from sam3_utils.sessions import fastest_cpu

    openvino, reason = _import("openvino")
    device, dtype = fastest_cpu()
    if openvino is None:
        remedy = "pip install -r requirements-openvino.txt: 2.4 times as fast where it was measured, docs/speed.md"
        return [Finding(NOTE, "OpenVINO", reason, remedy), Finding(OK, "--device auto", f"takes {device}, {dtype}")]
    try:
        core = openvino.Core()
        core.compile_model(core.read_model(_tiny_graph()), "CPU")
    except Exception as error:
        remedy = "pip install --force-reinstall -r requirements-openvino.txt"
        return [Finding(NOTE, "OpenVINO", f"does not run: {str(error).splitlines()[0][:120]}", remedy)]
    return [Finding(OK, "OpenVINO", openvino.__version__), Finding(OK, "--device auto", f"takes {device}, {dtype}")]


def check_ascend() -> list[Finding]:
    """CANN's compiler and the runtime of OMs."""
    from sam3_utils.atc import SET_ENV

    npu, findings = _answer(["npu-smi", "info", "-l"]) or _answer(["npu-smi", "info"]), []
    findings.append(
        Finding(OK, "NPU", "npu-smi answers") if npu
        else Finding(NOTE, "NPU", "npu-smi does not answer", "nothing, where there is none; otherwise its driver")
    )  # fmt: skip
    atc = shutil.which("atc")
    findings.append(Finding(OK, "atc", atc) if atc else Finding(NOTE, "atc", "not on PATH", SET_ENV))
    for name in ("aclruntime", "ais_bench"):
        module, reason = _import(name)
        remedy = "install the wheels of msit's ais_bench for this CANN; only needed to run an OM"
        findings.append(Finding(OK, name, "imports") if module else Finding(NOTE, name, reason, remedy))
    return findings


def check_libraries() -> list[Finding]:
    """OpenCV, which this kit does not need, where it is installed and does not load."""
    module, reason = _import("cv2")
    if module is None and "libGL" in reason:
        remedy = "apt install libgl1 libglib2.0-0, or pip install opencv-python-headless; this kit does not need it"
        return [Finding(NOTE, "OpenCV", reason, remedy)]
    return []


def memory_gib() -> tuple[float, float]:
    """Memory of this machine and what of it is free, in GiB; the limit of the container where there is one."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, int(limit.read_text())), min(free, int(limit.read_text()) - used)
    return total / 2**30, free / 2**30


def check_memory(folder: Path) -> list[Finding]:
    """Memory and disk against what facebook/sam3 takes."""
    total, free = memory_gib()
    fits = [name for name, need in NEEDS.items() if need <= free]
    text = f"{total:.1f} GiB, {free:.1f} free; enough for facebook/sam3 as: {'; '.join(fits) or 'nothing'}"
    remedy = (
        "" if len(fits) == len(NEEDS) else "close other programs; --weights int8 needs least, docs/troubleshooting.md"
    )
    findings = [Finding(OK if not remedy else NOTE, "memory", text, remedy)]
    space = shutil.disk_usage(folder).free / 1e9
    remedy = "" if space >= DISK else f"facebook/sam3 and one export of it take {DISK} GB"
    return [*findings, Finding(OK if not remedy else NOTE, "disk", f"{space:.1f} GB free in {folder}", remedy)]


def check_weights(folder: Path, sums: Path | None) -> list[Finding]:
    """A checkpoint folder: whole, as long as its header says, of the given SHA-256, and what it can do.

    Args:
        sums: lines of `<sha256>  <file name>`, as sha256sum writes them.
    """
    findings = []
    for check in (checkpoint.check_weight_files, checkpoint.check_processor_files):
        try:
            check(folder)
        except UsageError as error:
            findings.append(Finding(MISSING, "weights", str(error), checkpoint.DOWNLOAD_HINT))
    if findings:
        return findings
    weights = folder / checkpoint.WEIGHTS
    size, digest = weights.stat().st_size, files.sha256(weights)
    findings.append(Finding(OK, "weights", f"{weights}: {size} bytes, SHA-256 {digest}; this file is read"))
    clicks = checkpoint.has_clicks(folder)
    findings.append(Finding(OK, "prompts", "words, exemplars, boxes, clicks" if clicks else "words and exemplars only"))
    for line in sums.read_text(encoding="utf-8").splitlines() if sums else ():
        wanted, _, name = line.strip().partition(" ")
        name = name.strip().lstrip("*")
        path = folder / name
        if not name:
            continue
        if not path.is_file():
            findings.append(Finding(MISSING, name, f"listed in {sums}, not in {folder}", checkpoint.DOWNLOAD_HINT))
        elif files.sha256(path) != wanted.lower():
            findings.append(Finding(MISSING, name, f"another file than {sums} says", checkpoint.DOWNLOAD_HINT))
        else:
            findings.append(Finding(OK, name, "SHA-256 as given"))
    return findings


def check_graph(path: Path) -> list[Finding]:
    """An ONNX file or the parts of a split one: would ATC take it?"""
    from sam3_utils.backends import is_split, split_parts
    from sam3_utils.preflight import check_model

    findings = []
    for part, file in (split_parts(path) if is_split(path) else {"single": path}).items():
        if file.suffix != ".onnx":
            continue
        try:
            check_model(file, part)
            findings.append(Finding(OK, file.name, "fit for ATC: opset 17, its operators, no control flow"))
        except UsageError as error:
            findings.append(
                Finding(NOTE, file.name, str(error), "export it with sam3_export_onnx.py; docs/conversion.md")
            )
    return findings


def smoke(model_path: Path, processor_path: Path, device: str | None) -> list[Finding]:
    """A known picture, a red disc on grey, through the model: is it found by word and by click, and nothing else?"""
    from PIL import Image, ImageDraw

    from sam3_utils.backends import fit_processor, open_model
    from sam3_utils.differences import iou
    from sam3_utils.predictor import Predictor

    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(100, 140, (240, 320, 3), dtype=np.uint8))
    ImageDraw.Draw(picture).ellipse((110, 70, 210, 170), fill=(214, 40, 40))
    y, x = np.mgrid[:240, :320]
    disc = np.hypot(y - 120, x - 160) <= 50
    processor, model = checkpoint.load_processor(processor_path), open_model(model_path, device)
    fit_processor(processor, model, processor_path, model_path)
    predictor, findings = Predictor(model, processor), []
    predictor.set_image(picture)
    remedy = "weights, code and preparation do not belong together: check the SHA-256, and sam3_compare.py"

    def judge(name: str, value: float | None, text: str) -> None:
        good = value is not None and value >= 0.7
        findings.append(Finding(OK if good else MISSING, f"smoke: {name}", text, "" if good else remedy))

    found = predictor.predict_text("red circle").instances
    best = max((iou(one.mask, disc) for one in found), default=None)
    judge("word", best, f"'red circle': {len(found)} found" + ("" if best is None else f", IoU {best:.2f}"))
    if model.clicks != 0:
        value = iou(predictor.predict_points([(160, 120)]).best.mask, disc)
        judge("click", value, f"a click in its middle: IoU {value:.2f}")
    nothing = predictor.predict_text("green star").instances
    judge("absent", float(not nothing), f"'green star', which is not there: {len(nothing)} found")
    model.close()
    return findings


def download(source: str, folder: Path) -> None:
    """Fetch facebook/sam3's files into a folder, going on with what is there.

    Args:
        source: "modelscope" or "huggingface".

    Raises:
        UsageError: the site refuses, or cannot be reached.
    """
    os.environ.pop("HF_HUB_OFFLINE", None)
    try:
        if source == "modelscope":
            from modelscope import snapshot_download

            snapshot_download("facebook/sam3", local_dir=str(folder))
        else:
            from huggingface_hub import snapshot_download

            snapshot_download("facebook/sam3", local_dir=folder, allow_patterns=["*.json", "*.txt", "*.safetensors"])
    except Exception as error:  # both sites' packages raise many kinds
        hint = "accept the licence on the model's page and log in" if "40" in str(error) else "try the other source"
        raise UsageError(f"--download {source}: {str(error).splitlines()[0][:200]}; {hint}") from None
