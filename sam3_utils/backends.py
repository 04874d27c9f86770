# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch, ONNX Runtime and OM behind one interface: `open_model(path, device)`, then `infer(feeds)`.

Every backend has `shapes` (`contract.ModelShapes`), `runtime` ("torch", "onnx" or "om"), `device` (as it is in use),
`precision`, `taps` (which of `contract.TAPS` it offers), `infer(feeds, taps=())` and `close()`. Feeds and results are
numpy arrays by the contract's names; results are float32 whatever the runtime computes in. Taps come back beside the
outputs, and only those that are asked for.
"""

import os
import re
import stat
from pathlib import Path

import numpy as np

from sam3_utils import checkpoint, contract, files, graph
from sam3_utils.cli import CheckFailed, UsageError

PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "trt": ("TensorrtExecutionProvider", "onnxruntime-gpu"),
    "cann": ("CANNExecutionProvider", "onnxruntime-cann"),
}


def open_model(path: Path, device: str | None = None, dtype: str = "float32"):
    """Open a model; what `path` is decides the runtime.

    Args:
        path: a checkpoint folder (PyTorch), an `.onnx` file (ONNX Runtime) or an `.om` file (ais_bench).
        device: NPU id for an OM (default "0"); `cpu` (default), `cuda:0`, `npu:0` for a checkpoint; `cpu`, `cuda:0`,
            `trt:0`, `cann:0` for ONNX.
        dtype: computing type of a checkpoint, "float32", "bfloat16" or "float16"; the other files carry theirs.

    Raises:
        UsageError: the path is none of the three, the device does not exist or does not fit, or the model is not SAM3.
    """
    if path.is_dir():
        if (path / "sam3.onnx").is_file() and not (path / "config.json").exists():
            raise UsageError(f"{path}: a folder of an exported model; name its file, {path / 'sam3.onnx'}")
        return TorchModel(path, "cpu" if device is None else device, dtype)
    if dtype != "float32":
        raise UsageError(f"--dtype {dtype}: only a checkpoint folder can be computed in another type, not {path}")
    if path.suffix == ".onnx":
        return OnnxModel(path, "cpu" if device is None else device)
    if path.suffix == ".om":
        return OmModel(path, "0" if device is None else device)
    raise UsageError(f"{path}: not a checkpoint folder, an .onnx or an .om file")


class NotFinite(CheckFailed):
    """An output holds NaN or infinity."""


def _split_device(device: str, kinds: tuple[str, ...], path: Path) -> tuple[str, int]:
    """`cuda:1` to ("cuda", 1); anything that is not one of `kinds` is refused with the choices."""
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", device)
    if not match or match[1] not in kinds or (match[1] == "cpu" and match[2]):
        choices = ", ".join(kind if kind == "cpu" else f"{kind}:0" for kind in kinds)
        raise UsageError(f"--device {device}: {path} runs on one of {choices} (NPU ids such as 0 are for .om files)")
    return match[1], int(match[2] or 0)


def _finite(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs as float32, refused when one holds NaN or infinity: they would pass as "nothing found"."""
    for name, array in outputs.items():
        outputs[name] = array = np.asarray(array, dtype=np.float32)
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            bad = array.size - int(np.isfinite(array).sum())
            raise NotFinite(f"the model gave {bad} non-finite values of {array.size} in {name}; check its precision")
    return outputs


class TorchModel:
    """A checkpoint folder through PyTorch: the reference of every comparison."""

    runtime, taps = "torch", contract.TAPS

    def __init__(self, path: Path, device: str, dtype: str):
        import torch

        kind, index = _split_device(device, ("cpu", "cuda", "npu"), path)
        if kind == "npu":
            try:
                import torch_npu  # noqa: F401  registers the device with torch
            except Exception as error:  # a missing CANN library shows as OSError or RuntimeError, not ImportError
                raise UsageError(f"--device {device}: torch_npu cannot be used here ({error})") from None
        module = getattr(torch, kind)
        if kind != "cpu" and not (module.is_available() and index < module.device_count()):
            count = module.device_count() if module.is_available() else 0
            raise UsageError(f"--device {device}: PyTorch sees {count} {kind} devices here; use cpu or another index")
        if kind == "cuda":  # TF32 would make the reference differ with the batch size
            torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"
        self.device, self.precision = device, dtype
        self._device = torch.device(kind if kind == "cpu" else f"{kind}:{index}")
        self._model = checkpoint.load_model(path, dtype).to(self._device)
        self.shapes = checkpoint.model_shapes(self._model.config)

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run one batch; see the module's docstring."""
        import torch

        contract.check_feeds(feeds, self.shapes)
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for name, array in feeds.items()
        }
        pixel_values = tensors.pop("pixel_values").to(self._model.dtype)
        with torch.inference_mode():
            vision = self._model.vision_encoder(pixel_values)  # as Sam3Model.forward does when it gets a picture
            outputs = self._model(vision_embeds=vision, **tensors)
        results = {name: outputs[name] for name in contract.OUTPUTS}
        results |= {name: vision.fpn_hidden_states[contract.TAPS.index(name)] for name in taps}
        return _finite({name: tensor.float().cpu().numpy() for name, tensor in results.items()})

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None


class OnnxModel:
    """An ONNX file through ONNX Runtime, on exactly the provider that was asked for."""

    runtime = "onnx"

    def __init__(self, path: Path, device: str):
        kind, index = _split_device(device, tuple(PROVIDERS), path)
        graph.check_external_files(graph.load_structure(path), path)
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
        try:
            self._session = onnxruntime.InferenceSession(path, settings, providers=[(provider, options)])
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

        inputs, outputs = describe(self._session.get_inputs()), describe(self._session.get_outputs())
        self.shapes = contract.check_io(inputs, outputs, str(path))
        self.taps = tuple(name for name in contract.TAPS if name in outputs)
        self.precision = "float16 outputs" if "float16" in dict(outputs.values()) else "float32"

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run one batch; see the module's docstring."""
        contract.check_feeds(feeds, self.shapes)
        names = [*contract.OUTPUTS, *taps]
        return _finite(dict(zip(names, self._session.run(names, feeds))))

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


class OmModel:
    """An OM through ais_bench's `InferSession` on one NPU.

    ais_bench compares only the bytes of each input: a wrong dtype or shape of the same size is computed in silence.
    So the contract is checked when the model is opened, and every feed before it goes down.
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
        self._input_names = [value.name.rsplit(":", 1)[-1] for value in inputs]
        self._output_names = [value.name.rsplit(":", 1)[-1] for value in outputs]
        try:
            if len(set(self._output_names)) != len(self._output_names):
                raise UsageError(f"{path}: two outputs share a name: {', '.join(value.name for value in outputs)}")
            self.shapes = contract.check_io(describe(inputs), describe(outputs), str(path))
            if self.shapes.batch is None:
                raise UsageError(f"{path}: compiled with a free batch; compile it with a fixed --input_shape")
        except UsageError:
            self.close()
            raise
        self.device, self.taps = device, tuple(name for name in contract.TAPS if name in self._output_names)
        halves = [value.name for value in outputs if str(value.datatype).endswith("float16")]
        self.precision = "as compiled" + (", float16 outputs" if halves else "")

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run one batch of exactly the compiled size; see the module's docstring."""
        contract.check_feeds(feeds, self.shapes)
        arrays = [np.ascontiguousarray(feeds[name]) for name in self._input_names]
        try:
            results = self._session.infer(arrays, mode="static")
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in feeds.items())
            raise CheckFailed(f"NPU {self.device}: inference failed ({error}) with {shapes}") from None
        by_name = dict(zip(self._output_names, results, strict=True))
        return _finite({name: by_name[name] for name in (*contract.OUTPUTS, *taps)})

    def compute_times(self) -> list[float]:
        """Milliseconds of each run so far on the NPU alone, copies not counted, by ais_bench's own clock: float32 since
        the session began, so to 0.25 ms after an hour."""
        return [end - start for start, end in self._session.summary().exec_time_list]

    def close(self) -> None:
        """Free the model on the device. `InferSession.finalize` would end ACL for every session of the process."""
        self._session.free_resource()


def model_files(path: Path) -> list[Path]:
    """The files whose bytes decide a model's answers, for hashing."""
    if path.is_dir():
        return [path / "config.json", path / checkpoint.WEIGHTS]
    if path.suffix == ".onnx":
        return [path, *graph.check_external_files(graph.load_structure(path), path)]
    return [path]


def describe_model(path: Path, runtime: str, precision: str) -> dict:
    """What a result says of the model it came from: name, runtime, precision and hashes."""
    return {
        "name": path.resolve().name,
        "runtime": runtime,
        "precision": precision,
        "sha256": {file.name: files.sha256(file) for file in model_files(path)},
    }


def check_processor_fits(processor, model, processor_path: Path, model_path: Path) -> None:
    """Check that the processor makes pictures of the size that the model takes.

    Raises:
        UsageError: the sizes differ.
    """
    size, side = dict(processor.image_processor.size), model.shapes.image_size
    if (size.get("height"), size.get("width")) != (side, side):
        made = " x ".join(str(value) for value in size.values() if value)
        raise UsageError(
            f"{processor_path}: makes pictures of {made}, {model_path} takes {side} x {side}; "
            "they belong to different models"
        )
