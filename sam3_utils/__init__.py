# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the kit's scripts share, one subject per module; heavy libraries are imported where they are used."""
