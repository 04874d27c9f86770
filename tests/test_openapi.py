# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes from the service's own description, valid and broken ones: none may be a 500, and
every answer must be of the described form."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import picture_bytes, service


@pytest.mark.parametrize("mode", ("positive", "negative"))
def test_no_request_that_the_description_allows_or_forbids_breaks_the_service(tmp_path, mode):
    with service(tmp_path / "state", "--max_mb", "1") as (client, _):
        client.post("/v1/images", content=picture_bytes(1), headers={"Content-Type": "image/png"})
        result = subprocess.run(
            [Path(sys.executable).with_name("schemathesis"), "run", f"{client.base_url}/openapi.json",
             "--checks", "not_a_server_error,response_schema_conformance", "--mode", mode,
             "--phases", "examples,fuzzing", "--max-examples", "15", "--seed", "1", "--no-color"],
            capture_output=True, text=True, timeout=280, cwd=tmp_path,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-3000:]
        assert client.get("/readyz").status_code == 200
        log = (tmp_path / "state.log").read_text()
        assert "Traceback" not in log, log[-3000:]
