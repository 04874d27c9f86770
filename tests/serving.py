# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_serve.py started as a user starts it, for the tests of the service and of its page."""

import base64
import io
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from conftest import ROOT, TINY
from PIL import Image
from scenes import draw_scene


def picture_bytes(seed: int, kind: str = "PNG", size=(240, 320)) -> bytes:
    """A drawn scene as a file."""
    buffer = io.BytesIO()
    Image.fromarray(draw_scene(np.random.default_rng([31, seed]), *size)[0]).save(buffer, kind)
    return buffer.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def service(state: Path, *options, env: dict | None = None, wait=True):
    """A running service: yields (httpx.Client, process); killed at the end if it still runs."""
    port, log = free_port(), state.with_name(f"{state.name}.log")
    command = [
        sys.executable,
        ROOT / "sam3_serve.py",
        "--model_path",
        TINY,
        "--state_dir",
        state,
        "--port",
        port,
        *options,
    ]
    with open(log, "a") as stream:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=stream, stderr=stream, env={**os.environ, **(env or {})}
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    try:
        deadline = time.monotonic() + 120
        while wait:
            assert process.poll() is None, log.read_text()
            try:
                if client.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield client, process
    finally:
        client.close()
        process.kill()
        process.wait()
