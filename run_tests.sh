#!/usr/bin/env bash
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# Prepare .venv (first time: about 7 GB on x86_64), then check style and run the tests in two processes, a file of tests
# in one of them; arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/sam3_utils/environment.sh"
use_environment "$root" requirements.txt requirements-serve.txt requirements-dev.txt
cd "$root"
"$VENV_PYTHON" -m ruff check --no-cache .
"$VENV_PYTHON" -m pytest -q -n 2 --dist loadfile "$@"
