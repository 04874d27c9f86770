# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""One graph on one runtime: sessions of ONNX Runtime, OpenVINO and ais_bench with the same face.

A session has `runtime` ("onnx", "openvino" or "om"), `device`, `precision`, `inputs` and `outputs` (name -> (numpy
dtype name, shape), None for a free size), `run(feeds, names)` and `close()`. It knows nothing of SAM3.
"""

import importlib.util
import logging
import os
import re
import stat
from pathlib import Path

import numpy as np

from sam3_utils import graph, ort_graph
from sam3_utils.cli import CheckFailed, UsageError

logger = logging.getLogger(__name__)
INT8_GROUP = 1024  # OpenVINO's vision encoder of facebook/sam3 took 13.2 s without groups, 10.0 s with these
PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "trt": ("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "cann": ("CANNExecutionProvider", "onnxruntime-cann"),
}


def split_device(device: str, kinds: tuple[str, ...], path: Path) -> tuple[str, int]:
    """`cuda:1` to ("cuda", 1); anything that is not one of `kinds` is refused with the choices."""
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", device)
    if not match or match[1] not in kinds or (match[1] == "cpu" and match[2]):
        choices = ", ".join(kind if kind == "cpu" else f"{kind}:0" for kind in kinds)
        choices += ", openvino, auto" if kinds == tuple(PROVIDERS) else ""
        raise UsageError(f"--device {device}: {path} runs on one of {choices} (NPU ids such as 0 are for .om files)")
    return match[1], int(match[2] or 0)


def _failed(device: str, error: Exception, feeds: dict[str, np.ndarray]) -> CheckFailed:
    """What to raise when a run fails, as it does where memory is too small for the batch."""
    shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in feeds.items())
    return CheckFailed(f"{device}: inference failed ({' '.join(str(error).split())[:300]}) with {shapes}")


# The names of /proc/cpuinfo for instructions that multiply bfloat16: Intel's matrix unit, and AVX-512 of both makers.
CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def fastest_cpu() -> tuple[str, str]:
    """(device, dtype) that runs an ONNX file fastest on this CPU, by the measurements in docs/speed.md; says why."""
    flags = CPUINFO.read_text(encoding="utf-8").split()
    found = [flag for flag in BFLOAT16_FLAGS if flag in flags]
    if importlib.util.find_spec("openvino") is None:
        choice, reason = ("cpu", "float32"), "openvino is not installed: pip install -r requirements-openvino.txt"
    elif found:
        choice, reason = ("openvino", "bfloat16"), f"this CPU has {found[0]}"
    else:
        choice, reason = ("openvino", "float32"), f"this CPU has none of {', '.join(BFLOAT16_FLAGS)}"
    logger.warning("--device auto: %s, %s (%s)", *choice, reason)
    return choice


class OpenVinoSession:
    """An ONNX file through OpenVINO on the CPU, in float32 or bfloat16."""

    runtime, device = "openvino", "openvino"

    def __init__(self, path: Path, dtype: str):
        model = graph.load_structure(path)
        graph.check_external_files(model, path)
        try:
            import openvino
        except ImportError as error:
            raise UsageError(
                f"--device openvino: it is not installed ({error}): pip install -r requirements-openvino.txt"
            ) from None
        core = openvino.Core()
        if dtype == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UsageError("--dtype bfloat16: this CPU has no instructions for it; use float32")
        settings = {
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
            "PERFORMANCE_HINT": "LATENCY",
            # With int8 weights: the other side of a product is rounded to 8 bits in groups of so many channels.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(INT8_GROUP),
        }
        try:
            network = core.read_model(str(path))
            compiled = core.compile_model(network, "CPU", settings)
        except RuntimeError as error:
            raise UsageError(f"{path}: OpenVINO cannot open it: {' '.join(str(error).split())[:300]}") from None

        def describe(ports):
            return {
                port.any_name: (
                    np.dtype(port.element_type.to_dtype()).name,
                    tuple(size.get_length() if size.is_static else None for size in port.partial_shape),
                )
                for port in ports
            }

        # Compiling keeps the ports' order, but may leave an output with the name of a node that was optimised away.
        self.inputs, self.outputs = describe(network.inputs), describe(network.outputs)
        self._request = compiled.create_infer_request()
        int8 = any(node.op_type == "DequantizeLinear" for node in model.graph.node)
        self.precision = dtype + (", int8 products" if int8 else "")

    def run(self, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        """The outputs `names` of one run; all of them are computed."""
        try:
            self._request.infer([np.ascontiguousarray(feeds[name]) for name in self.inputs])
        except RuntimeError as error:
            raise _failed(self.device, error, feeds) from None
        results = dict(zip(self.outputs, self._request.output_tensors, strict=True))
        return {name: results[name].data.copy() for name in names}

    def close(self) -> None:
        """Free the session's memory."""
        self._request = None


class OnnxSession:
    """An ONNX file through ONNX Runtime, on exactly the provider that was asked for."""

    runtime = "onnx"

    def __init__(self, path: Path, device: str):
        kind, index = split_device(device, tuple(PROVIDERS), path)
        model = graph.load_structure(path)
        graph.check_external_files(model, path)
        import onnxruntime

        provider, package = PROVIDERS[kind]
        if provider not in onnxruntime.get_available_providers():
            raise UsageError(
                f"--device {device}: this onnxruntime has only {', '.join(onnxruntime.get_available_providers())}; "
                f"{provider} comes with {package}"
            )
        options = {} if kind == "cpu" else {"device_id": str(index)}
        if kind == "cuda":
            options["use_tf32"] = "0"
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        rewrites = ()
        if kind == "cpu":
            rewrites = ort_graph.for_cpu(model)
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString() if rewrites else path, settings, providers=[(provider, options)]
            )
        except Exception as error:  # onnxruntime raises its own kinds, one per failure
            raise UsageError(f"{path}: ONNX Runtime cannot open it on {device}: {str(error)[:300]}") from None
        # A provider that cannot start is dropped with a warning, and the CPU computes instead.
        if self._session.get_providers()[0] != provider:
            raise UsageError(f"--device {device}: {provider} did not start, ONNX Runtime fell back to the CPU")
        self.device = device

        def describe(values):
            names = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}
            return {
                value.name: (
                    names.get(value.type, value.type),
                    tuple(size if isinstance(size, int) else None for size in value.shape),
                )
                for value in values
            }

        self.inputs, self.outputs = describe(self._session.get_inputs()), describe(self._session.get_outputs())
        dtype = "float16 outputs" if "float16" in dict(self.outputs.values()) else "float32"
        self.precision = ", ".join((dtype, *rewrites))

    def run(self, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        """The outputs `names` of one run."""
        try:
            return dict(zip(names, self._session.run(names, feeds)))
        except Exception as error:  # onnxruntime raises its own kinds, too little memory among them
            raise _failed(self.device, error, feeds) from None

    def close(self) -> None:
        """Free the session's memory."""
        self._session = None


def check_om_path(path: Path) -> Path:
    """The absolute path of an OM, checked as ais_bench 0.0.2 checks it, with texts that name the remedy.

    Raises:
        UsageError: a link, a character outside `A-Za-z0-9_./-`, a mode that lets others write, or a foreign owner.
    """
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        raise UsageError(
            f"{path}: a symbolic link, which ais_bench refuses; give the file it points to: {path.resolve()}"
        )
    if re.search(r"[^A-Za-z0-9_./-]", str(path)):
        raise UsageError(f"{path}: ais_bench takes only letters, digits and _ . / - in the whole path; move the file")
    status = path.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(f"{path}: group or others may write it, which ais_bench refuses; chmod go-w {path}")
    if os.geteuid() != status.st_uid and status.st_gid not in os.getgroups():
        raise UsageError(f"{path}: belongs to another user, which ais_bench refuses; copy the file")
    return path


class OmSession:
    """An OM through ais_bench's `InferSession` on one NPU.

    ais_bench compares only the bytes of each input: a wrong dtype or shape of the same size is computed in silence.
    Whoever runs a session checks the feeds before.
    """

    runtime = "om"

    def __init__(self, path: Path, device: str):
        if not re.fullmatch(r"\d{1,3}", device) or int(device) > 255:
            raise UsageError(f"--device {device}: an .om runs on one NPU id, such as 0")
        path = check_om_path(path)
        try:
            from ais_bench.infer.interface import InferSession
        except ImportError as error:
            raise UsageError(
                f"{path}: an .om needs ais_bench and aclruntime ({error}); install the two wheels that README names "
                "(the package ais-bench-benchmark is another thing and hides them)"
            ) from None
        try:
            self._session = InferSession(int(device), str(path))
        except Exception as error:  # aclruntime reports every failure as a bare RuntimeError
            raise UsageError(f"{path}: cannot be opened on NPU {device}: {error}; see npu-smi info") from None

        def describe(values):
            return {
                value.name.rsplit(":", 1)[-1]: (
                    str(value.datatype).rsplit(".", 1)[-1],
                    tuple(None if size < 0 else size for size in value.shape),  # -1: compiled with a free size
                )
                for value in values
            }

        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        # An OM calls its outputs <node>:<index>:<name>, in an order of its own.
        self.inputs, self.outputs = describe(inputs), describe(outputs)
        fault = None
        if len(self.outputs) != len(outputs):
            fault = f"two outputs share a name: {', '.join(value.name for value in outputs)}"
        elif any(shape[0] is None for _, shape in self.inputs.values()):
            fault = "compiled with a free batch; compile it with a fixed --input_shape"
        if fault:
            self.close()
            raise UsageError(f"{path}: {fault}")
        self.device = device
        halves = any(dtype == "float16" for dtype, _ in self.outputs.values())
        self.precision = "as compiled" + (", float16 outputs" if halves else "")

    def run(self, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        """The outputs `names` of one run with exactly the compiled shapes."""
        arrays = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        try:
            results = self._session.infer(arrays, mode="static")
        except RuntimeError as error:
            raise _failed(f"NPU {self.device}", error, feeds) from None
        by_name = dict(zip(self.outputs, results, strict=True))
        return {name: by_name[name] for name in names}

    def compute_times(self) -> list[float]:
        """Milliseconds of each run so far on the NPU alone, copies not counted, by ais_bench's own clock: float32 since
        the session began, so to 0.25 ms after an hour."""
        return [end - start for start, end in self._session.summary().exec_time_list]

    def close(self) -> None:
        """Free the model on the device. `InferSession.finalize` would end ACL for every session of the process."""
        self._session.free_resource()
