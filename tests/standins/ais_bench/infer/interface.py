# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0

"""Test stand-in for `ais_bench.infer.interface` 0.0.2: runs the ONNX file behind an OM written by `make_om`.

It keeps the behaviour of the real tool in static mode, the unfriendly parts above all: of an input only the byte
count is checked, reasons are printed to stdout, and only a bare RuntimeError reaches Python.
"""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import aclruntime
import numpy as np
import onnxruntime as ort

SCALARS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"]
TORCH_TYPES = ["Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Long", "Bool", "Int"]


def _failure(line):
    """Prints the reason to stdout and gives the bare error that Python gets."""
    print(line, flush=True)
    return RuntimeError("[1][ACL: general failure]")


def _check_int(name, value, low, high):
    """TypeError unless an int, ValueError outside the range."""
    if not isinstance(value, int):
        raise TypeError(f"{name}:{value} is not a integer!")
    if not low <= value <= high:
        raise ValueError(f"{name}:{value} is out of range [{low}, {high}]")


def _check_file(path, suffix):
    """The path rules of the real tool, each breach a ValueError. The characters are those of the absolute path."""
    try:
        full = os.path.abspath(path)
        legal = re.fullmatch(r"[A-Za-z0-9_./-]+", full)
    except TypeError:
        legal = None
    if not legal:
        raise ValueError("The path string is illegal. Please check.")
    if not os.path.isfile(full):
        raise ValueError(f"The path:{path} is not a file.")
    info = os.stat(full)
    foreign = info.st_uid != os.geteuid() and info.st_gid not in os.getgroups()
    if os.path.islink(full) or foreign or info.st_mode & 0o022 or not os.access(full, os.R_OK):
        print(f"[ERROR] path: {full} is a soft link, not yours, over mode 0o755 or not readable", flush=True)
        raise ValueError(f"The path:{path} is illegal. Please check the error log for more detail.")
    if os.path.splitext(full)[1] != suffix or info.st_size > 10 * 1024**3:
        raise ValueError(f"The suffix of path:{path} is not {suffix}, or the file is larger than 10 GB. Please check.")


def _check_sizes(sizes, mode):
    """An unknown mode is a ValueError here; sizes are ints in 1..16 GiB, None only outside dymshape."""
    if mode not in ("static", "dymbatch", "dymhw", "dymdims", "dymshape"):
        raise ValueError("infer mode is illegal, Please check.")
    if sizes is not None or mode == "dymshape":
        for size in sizes if isinstance(sizes, list) else [sizes]:
            _check_int("custom size", size, 1, 16 * 1024**3)


def _to_array(feed):
    """A feed as C-contiguous array. Nothing is cast; a type outside the documented ones is a RuntimeError."""
    if isinstance(feed, np.ndarray):
        return np.ascontiguousarray(feed)
    if isinstance(feed, aclruntime.Tensor):
        return feed._array
    if isinstance(feed, np.generic) and feed.dtype.name in SCALARS:
        return np.array([feed])
    if hasattr(feed, "type") and feed.type() in [f"torch.{name}Tensor" for name in TORCH_TYPES]:
        return np.ascontiguousarray(feed.numpy())
    raise RuntimeError(f"type:{type(feed)} invalid")


def _describe(entry):
    """The descriptor of one input or output of the OM file."""
    size = int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize
    layout = 0 if len(entry["shape"]) == 4 else 2
    datatype = aclruntime._dtype_of(entry["dtype"])
    return aclruntime.tensor_desc(entry["name"], datatype, layout, list(entry["shape"]), size, size)


def _as_declared(array, entry):
    """A result in the dtype and shape the OM declares; float16 saturates instead of becoming inf."""
    if entry["dtype"] == "float16":
        array = np.clip(array, -65504, 65504)
    return np.resize(array.astype(entry["dtype"]), entry["shape"])


class InferSession:
    """Loads the OM at once. Its context ends with `free_resource`, that of every session with `finalize`."""

    _finalized = False

    def __init__(self, device_id, model_path, acl_json_path=None, debug=False, loop=1):
        if not model_path:
            raise RuntimeError("empty model path!")
        _check_file(model_path, ".om")
        if acl_json_path:
            _check_file(acl_json_path, ".json")
        _check_int("device", device_id, 0, 255)
        _check_int("loop", loop, 1, 100000)
        if not isinstance(model_path, str):
            # A Path passes the checks above; the native class refuses it.
            raise TypeError("InferenceSession(): incompatible constructor arguments, model path must be str")
        self.device_id, self.model_path, self.loop = device_id, model_path, loop
        self._start, self._times, self._alive = time.time(), [], True
        self._check_context()
        self._load()

    def _load(self):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        try:
            self._om = json.loads(Path(self.model_path).read_text(encoding="utf-8"))
            self._inputs = [_describe(entry) for entry in self._om["inputs"]]
            self._outputs = [_describe(entry) for entry in self._om["outputs"]]
            self._onnx = ort.InferenceSession(self._om["onnx"], options, providers=["CPUExecutionProvider"])
        except Exception as error:
            # How a broken OM is reported is not documented; the bare error is a plain choice.
            raise _failure(f"[ERROR] load model from file failed, model file is {self.model_path}: {error}") from error

    def _check_context(self):
        """Documented is only that calls fail without a context; the bare error is a plain choice."""
        if not self._alive or InferSession._finalized:
            raise _failure("[ERROR] set context failed. ret=1")

    def get_inputs(self):
        self._check_context()
        return list(self._inputs)

    def get_outputs(self):
        self._check_context()
        return list(self._outputs)

    def infer(self, feeds, mode="static", custom_sizes=100000, out_array=True):
        """Runs feeds given in the OM's input order; results come in the OM's output order."""
        if not isinstance(feeds, list) or not feeds:
            raise ValueError("the list be checked is not a list, or is empty!")
        if not isinstance(out_array, bool):
            raise TypeError(f"value:{out_array} is not a bool!")
        _check_sizes(custom_sizes, mode)
        arrays = [_to_array(feed) for feed in feeds]
        self._check_context()
        if mode != "static":
            self._prepare_dynamic(mode, arrays)
        tensors = self._execute(self._copy_in(arrays))
        if not out_array:
            return tensors
        for tensor in tensors:
            tensor.to_host()
        return [np.array(tensor) for tensor in tensors]

    def _prepare_dynamic(self, mode, arrays):
        """Every OM here is static, so each dynamic mode ends in its error."""
        if len(arrays) != len(self._inputs):
            raise RuntimeError("input datas and intensors nums not matched!")
        dims = [pair for array, desc in zip(arrays, self._inputs) for pair in zip(array.shape, desc.shape)]
        if mode == "dymbatch" and any(given != declared for given, declared in dims):
            raise RuntimeError("input datas and intensors dim not matched!")
        if mode in ("dymbatch", "dymhw"):
            raise RuntimeError(f"not a {mode} model!")
        raise _failure(f"[ERROR] check {mode} failed")

    def _copy_in(self, arrays):
        """Compares byte counts only, then reads the bytes as the declared dtype and shape."""
        for i, (array, desc) in enumerate(zip(arrays, self._inputs)):
            if array.nbytes != desc.realsize:
                sizes = f"in size:{array.nbytes} needsize:{desc.realsize}"
                raise _failure(f"[ERROR] check i:{i} name:{desc.name} {sizes} not match")
        if len(arrays) != len(self._inputs):
            # With too many the real tool reads past its list, which has no defined result.
            raise _failure(f"[WARN] intensors in:{len(arrays)} need:{len(self._inputs)} not match")
        feeds = {}
        for array, entry in zip(arrays, self._om["inputs"]):
            value = np.frombuffer(array.tobytes(), dtype=entry["dtype"]).reshape(entry["shape"])
            # The cast stands for what ATC did to the graph, int64 to int32 for one; the caller's bytes are not cast.
            feeds[entry["onnx_name"]] = value.astype(entry["onnx_dtype"])
        return feeds

    def _execute(self, feeds):
        names = [entry["onnx_name"] for entry in self._om["outputs"]]
        for _ in range(self.loop):
            start = self._now()
            try:
                results = self._onnx.run(names, feeds)
            except Exception as error:
                raise _failure(f"[ERROR] acl execute failed:1 {error}") from error
            self._times.append((start, self._now()))
        tensors = [aclruntime.Tensor(_as_declared(*pair)) for pair in zip(results, self._om["outputs"])]
        for tensor in tensors:
            tensor.to_device(self.device_id)
        return tensors

    def _now(self):
        """Milliseconds since the session began, in float32: coarse after an hour."""
        return float(np.float32((time.time() - self._start) * 1000))

    def summary(self):
        """`exec_time_list` holds (start_ms, end_ms) of every execution."""
        self._check_context()
        return SimpleNamespace(exec_time_list=list(self._times))

    def reset_summaryinfo(self):
        """Clears the list, not the zero point."""
        self._times.clear()

    def free_resource(self):
        """Ends this session. A second call, or one after `finalize`, is only logged."""
        if not self._alive or InferSession._finalized:
            print("[ERROR] set context failed. ret=1", flush=True)
        self._alive, self._onnx = False, None

    @staticmethod
    def finalize():
        """Ends ACL for the whole process: no session, old or new, works after it."""
        InferSession._finalized = True
