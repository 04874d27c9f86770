# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0

"""Test stand-in for `aclruntime` 0.0.2: the types that `ais_bench` hands to Python."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class dtype(IntEnum):
    """Data types with the codes of the real enum, each name also a numpy name. There is no bfloat16."""

    float32, float16, int8, int32, uint8, int16 = 0, 1, 2, 3, 4, 6
    uint16, uint32, int64, uint64, double, bool = 7, 8, 9, 10, 11, 12

    def __str__(self):
        return f"dtype.{self.name}"

    # An f-string would print the number of an IntEnum; the real enum prints its name everywhere.
    __format__ = object.__format__


def _dtype_of(numpy_dtype):
    """The enum member of a numpy dtype (or its name); KeyError where the real enum has none."""
    return {np.dtype(member.name): member for member in dtype}[np.dtype(numpy_dtype)]


@dataclass
class tensor_desc:
    """An input or output of a model. `format` is 0 for NCHW, 2 for ND; `realsize` follows a dynamic setting."""

    name: str
    datatype: dtype
    format: int
    shape: list
    size: int
    realsize: int


class Tensor:
    """A tensor on the host, or on a device, where numpy cannot read it until `to_host()`."""

    def __init__(self, array):
        self._array = np.array(array)
        self.dtype, self.shape, self.device = _dtype_of(self._array.dtype), list(self._array.shape), -1

    def to_device(self, device_id):
        self.device = device_id

    def to_host(self):
        self.device = -1

    def __array__(self, dtype=None):
        if self.device >= 0:
            raise RuntimeError("tensor is in npu. can't convert to numpy array")
        return self._array.astype(dtype or self._array.dtype)
