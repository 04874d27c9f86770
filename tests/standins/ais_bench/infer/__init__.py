# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0

"""Test stand-in for `ais_bench.infer`."""
