# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What ATC of CANN 8.5 takes and what it says: command line, precision modes, list of float32 nodes, error codes."""

import logging
import re
from pathlib import Path

from sam3_utils.cli import UsageError

logger = logging.getLogger("sam3_convert_om")
SOC_FAMILY = {"300I": "Ascend310P", "800I": "Ascend910B"}

# ATC's own names; those that only Ascend950 computes (hif8) are left out.
MODES_V2 = ("fp16", "origin", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16")
MODES = (
    "force_fp16", "force_fp32", "cube_fp16in_fp32out", "allow_fp32_to_fp16", "allow_fp32_to_bf16",
    "must_keep_origin_dtype", "allow_mix_precision", "allow_mix_precision_fp16", "allow_mix_precision_bf16",
)  # fmt: skip
ORIGIN_MODES = ("origin", "must_keep_origin_dtype")
BFLOAT16_MODES = ("mixed_bfloat16", "allow_mix_precision_bf16", "allow_fp32_to_bf16")
CUBE_OPERATORS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")  # what the matrix unit computes

SUCCESS = "ATC run success"
EXPORT_AGAIN = "export again with sam3_export_onnx.py"
PLOG = "read the log above that line, then ~/ascend/log/debug/plog"
SET_ENV = "source the set_env.sh of your CANN, such as /usr/local/Ascend/ascend-toolkit/set_env.sh"
UNSUPPORTED = ("an operator is not supported on this chip", "check SOC_VERSION and its operator package; " + PLOG)
# What ATC prints: its meaning, and what to do. Codes of CANN's error reference; EZ0501 to EZ9010, E19010 and E20001 are
# older than 8.5.0. The entries without a code come from the flag parser and from the loader of shared libraries.
ERRORS = {
    "unknown command line flag": ("this CANN does not know the flag", "use CANN 8.5.0"),
    "error while loading shared libraries": (
        "a CANN library is missing",
        SET_ENV + "; without an NPU driver also put the toolkit's <arch>-linux/devlib on LD_LIBRARY_PATH",
    ),
    "No space left on device": ("the disk is full", "free space where sam3_om and ~/atc_data lie"),
    "E10001": ("a flag's value is invalid", "the line names the flag; check SOC_VERSION and the file that it names"),
    "E10002": ("--input_shape is malformed", EXPORT_AGAIN),
    "E10003": ("a flag's value is invalid", "for keep_dtype: " + EXPORT_AGAIN + ", or --keep_dtype none"),
    "E10007": ("a required flag is missing", "use CANN 8.5.0"),
    "E10009": ("two flags for dynamic shapes were given", "pass neither, the batch is fixed here"),
    "E10011": ("--input_shape holds a size that is not positive", EXPORT_AGAIN),
    "E10016": ("a name in a flag is not a node of the model", EXPORT_AGAIN),
    "E10041": ("the model cannot be loaded", "check that the weights lie beside sam3.onnx, or " + EXPORT_AGAIN),
    "E10042": ("keep_dtype names nodes that the model lacks", EXPORT_AGAIN + ", or --keep_dtype none"),
    "E10054": ("a required flag is empty", "check SOC_VERSION"),
    "E10056": ("two flags exclude each other", "give only one of them"),
    "E10410": ("a file that a flag names is missing", "give an existing file, or --keep_dtype none"),
    "E10501": ("an operator is not registered", SET_ENV + " (it sets ASCEND_OPP_PATH)"),
    "E13001": ("a file cannot be opened", "check that it is there and readable"),
    "E13004": ("a file cannot be written", "free space and check permissions of sam3_om"),
    "E13023": ("the OM is too large to be written", "use a precision mode with float16 weights"),
    "E16001": ("the model has no inputs or outputs", EXPORT_AGAIN),
    "E16002": ("the ONNX parser does not know an operator of this opset", EXPORT_AGAIN + " (ATC takes opset 11 to 18)"),
    "E16004": ("the model has no graph", EXPORT_AGAIN),
    "E16005": ("the model imports more than one operator set", EXPORT_AGAIN),
    "E19010": ("the ONNX parser does not know an operator of this opset", EXPORT_AGAIN + " (ATC takes opset 11 to 18)"),
    "E19999": ("an inner error", PLOG),
    "E20001": ("an operator failed to compile", PLOG),
    "E89999": ("an operator's types or shapes do not fit each other", PLOG),
    "EC0010": ("a Python module that ATC needs is missing", "install it for the python3 on PATH, with numpy below 2"),
    "EZ0501": UNSUPPORTED,
    "EZ3002": UNSUPPORTED,
    "EZ3003": UNSUPPORTED,
    "EZ9010": UNSUPPORTED,
    "EZ9999": ("an inner error of the operator compiler", PLOG),
}
ERROR_LINE = re.compile(r"^(E[A-Z\d]\d{4})\b|(" + "|".join(key for key in ERRORS if " " in key) + ")")
AI_CPU = re.compile(r"^W11001:.*?\bOp \[?([^\]\s]+)\]? does not hit", re.MULTILINE)


def choose_precision(args, soc: str) -> tuple[str, str]:
    """ATC's flag and value, always explicit; without a flag ATC would choose float16 as well, but tell nobody.

    Raises:
        UsageError: the chip cannot compute in that mode. The matrix unit of Ascend310P multiplies float16 and integers
            only, see Intrinsic_mmad in CANN's platform file Ascend310P3.ini.
    """
    flag = "precision_mode" if args.precision_mode else "precision_mode_v2"
    mode = getattr(args, flag)
    if soc.startswith("Ascend310P") and mode in BFLOAT16_MODES:
        raise UsageError(f"--{flag} {mode}: {soc} has no bfloat16; use fp16 or mixed_float16")
    if soc.startswith("Ascend310P") and mode in ORIGIN_MODES:
        raise UsageError(
            f"--{flag} {mode}: {soc} has no float32 matrix product, which this mode asks for; use cube_fp16in_fp32out"
        )
    return flag, mode


def keep_list_path(onnx_path: Path) -> Path:
    """Where the export writes the list of float32 nodes of a graph: `keep_dtype.cfg` beside the single one, otherwise
    `sam3_vision.keep_dtype.cfg` and so on."""
    return onnx_path.with_name("keep_dtype.cfg" if onnx_path.stem == "sam3" else f"{onnx_path.stem}.keep_dtype.cfg")


def choose_keep_list(choice: str | None, onnx_path: Path, model, mode: str, soc: str) -> Path | None:
    """The file for `--keep_dtype`, or None where there is none to give.

    Args:
        choice: a path, "none", or None for the export's own list.
        model: onnx.ModelProto, to find the names in; ATC 8.5 and later skip an unknown name with a line in a log only.

    Raises:
        UsageError: the file is missing, names what the model lacks, or excludes the mode.
    """
    if choice == "none" or (choice is None and mode in ORIGIN_MODES):
        return None
    if mode in ORIGIN_MODES:
        raise UsageError(f"--keep_dtype {choice}: without effect in mode {mode}, leave one of the two out")
    path = keep_list_path(onnx_path) if choice is None else Path(choice)
    if not path.is_file():
        raise UsageError(
            f"{path}: the list of nodes that stay float32 is missing; {EXPORT_AGAIN}, or --keep_dtype none"
        )
    operators = {node.name: node.op_type for node in model.graph.node}
    names = list(filter(None, map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())))
    unknown = [name for name in names if name not in operators and not re.fullmatch(r"OpType::[A-Z][A-Za-z\d]*", name)]
    if unknown:
        raise UsageError(
            f"{path}: {len(unknown)} of {len(names)} names are no nodes of {onnx_path} (first: {unknown[0]}); "
            f"{EXPORT_AGAIN}, or --keep_dtype none"
        )
    cube = [name for name in names if operators.get(name) in CUBE_OPERATORS]
    if soc.startswith("Ascend310P") and cube:
        logger.warning("%s: %d matrix operators stay float16 all the same, %s has no other", path, len(cube), soc)
    return path if names else None


def input_shape(model, batch: int, where: Path) -> str:
    """`--input_shape` with the graph's own sizes: `pixel_values:4,3,1008,1008;input_ids:4,32;attention_mask:4,32`.

    Where pictures (P) and phrases (N) are counted apart, as in the detector of a split model, there is one picture.

    Raises:
        UsageError: the graph's batch is fixed to another number, or another size is free.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    parts = []
    for value in (value for value in model.graph.input if value.name not in weights):
        first, *sizes = (dim.dim_value for dim in value.type.tensor_type.shape.dim)  # 0: free
        rows = 1 if value.type.tensor_type.shape.dim[0].dim_param == "P" else batch
        if first not in (0, rows) or 0 in sizes:
            raise UsageError(f"{where}: {value.name} is not free in the batch alone; {EXPORT_AGAIN}")
        parts.append(f"{value.name}:{','.join(map(str, (rows, *sizes)))}")
    return ";".join(parts)


def checked_path(path: Path) -> Path:
    """The absolute path, if ATC takes it: it allows letters, digits, `_ - .` and Chinese characters in the whole path.

    Raises:
        UsageError: another character, such as a space.
    """
    path = path.resolve()
    wrong = re.search(r"[^\u4e00-\u9fa5A-Za-z0-9./_-]", str(path))
    if wrong:
        raise UsageError(f"{path}: ATC takes no {wrong[0]!r} in a path; move the folder or rename it")
    return path


def command_line(onnx_path, output, shapes, soc, precision, keep_list, fusion_switch) -> list[str]:
    """ATC's command line, word by word; paths are absolute, because ATC runs in a folder of its own."""
    flag, mode = precision
    command = [
        "atc",
        "--framework=5",  # ONNX
        f"--model={checked_path(onnx_path)}",
        f"--output={checked_path(output)}",
        f"--input_shape={shapes}",
        f"--soc_version={soc}",
        f"--{flag}={mode}",
    ]
    if keep_list:
        command.append(f"--keep_dtype={checked_path(keep_list)}")
    if fusion_switch:
        command.append(f"--fusion_switch_file={checked_path(fusion_switch)}")
    return [*command, "--op_compiler_cache_mode=enable", "--log=error"]


def explain(output: str) -> list[str]:
    """The first three different errors in ATC's output: the line, its number, what it means, what to do."""
    found = {}
    for number, line in enumerate(output.splitlines(), 1):
        match = ERROR_LINE.search(line)
        if match and (match[1] or match[2]) not in found:
            meaning, remedy = ERRORS.get(match[1] or match[2], ("a code this kit does not know", PLOG))
            text = re.sub(r"\[PID: \d+\] \S+ ", "", line.strip())[:300]
            found[match[1] or match[2]] = f"line {number}: {text} (= {meaning}; {remedy})"
    return list(found.values())[:3]
