# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What every path of the service does: keep pictures, run things on their device, measure."""

import base64
import binascii
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sam3_utils.devices import DeviceThread
from sam3_utils.images import PictureError, decode_rgb
from sam3_utils.predictor import Predictor, image_id_of
from sam3_utils.store import Store


class ApiError(Exception):
    """An answer that is an error: `{"error": {"code", "message", "field"}}`."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


@dataclass(frozen=True)
class Settings:
    """What the service is told when it starts; `token` None: nobody is asked for one."""

    model: dict  # of `backends.describe_model`, and "device"
    max_bytes: int = 50_000_000
    max_pixels: int = 100_000_000
    timeout: float = 600.0
    token: str | None = None
    hosts: tuple[str, ...] = ("*",)


class Engine:
    """The store, the device threads and the measurements of one service. Methods may be called from any thread."""

    def __init__(self, settings: Settings, store: Store, threads: list[DeviceThread]):
        self.settings, self.store, self.threads = settings, store, threads
        self.registry = CollectorRegistry()
        self.requests = Counter("sam3_requests", "Answers", ("path", "status"), registry=self.registry)
        self._seconds = Histogram(
            "sam3_stage_seconds", "Time of a stage", ("stage",), registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
        )  # fmt: skip
        self._waiting = Gauge("sam3_waiting", "Requests in the queues", registry=self.registry)
        self._waiting.set_function(lambda: sum(thread.waiting() for thread in threads))
        self._cache = Gauge("sam3_feature_cache_bytes", "Bytes of features that are kept", registry=self.registry)
        self._cache.set_function(lambda: sum(thread.predictor.cache.bytes for thread in threads if thread.predictor))

    def thread_of(self, image_id: str) -> DeviceThread:
        """A picture always goes to the same device, whose cache has its features."""
        return self.threads[int(image_id[:8], 16) % len(self.threads)]

    def on_device(self, image_id: str, work):
        """What `work(predictor)` returns, computed by the picture's device.

        Raises:
            Busy, NotReady: from `DeviceThread.submit`. ApiError: no answer in time. Whatever `work` raises.
        """
        future = self.thread_of(image_id).submit(work)
        try:
            return future.result(self.settings.timeout)
        except TimeoutError:
            future.cancel()
            raise ApiError(503, "busy", f"no answer within {self.settings.timeout:g} s") from None

    def timed(self, image_id: str, timings: dict, stage: str, started: float) -> None:
        """Note in `timings`, for /v1/stats and for Prometheus how long a stage took since `started`."""
        timings[stage] = self.thread_of(image_id).timed(stage, started)
        self._seconds.labels(stage).observe(timings[stage] / 1000)

    def take_picture(self, predictor: Predictor, stored: dict, timings: dict) -> None:
        """Make the predictor's picture this one, from its kept features or from the file; on the device's thread."""
        timings["encode"] = 0.0
        image_id = stored["image_id"]
        if not predictor.use_image(image_id, (stored["height"], stored["width"])):
            started = time.perf_counter()
            predictor.set_image(self.store.image_file(image_id).read_bytes(), image_id)
            self.timed(image_id, timings, "encode", started)

    def known_image(self, image_id: str) -> dict:
        """What the store has of a picture; ApiError 404 where it has nothing."""
        stored = self.store.image(image_id)
        if stored is None:
            raise ApiError(404, "unknown_image", "never seen here, or deleted; send it again", "image_id")
        return stored

    def keep_image(self, data: bytes, name: str) -> dict:
        """Check a picture's bytes and pixels, then store it; ApiError 400 or 413 where it cannot be used."""
        settings = self.settings
        if not data:
            raise ApiError(400, "bad_image", "empty", "image")
        if len(data) > settings.max_bytes:
            raise ApiError(413, "too_large", f"{len(data)} bytes are over {settings.max_bytes}", "image")
        image_id = image_id_of(data)
        stored = self.store.image(image_id)
        if stored is not None:
            return stored
        try:
            with Image.open(io.BytesIO(data)) as image:
                pixels = image.width * image.height
            if pixels > settings.max_pixels:
                raise ApiError(413, "too_large", f"{pixels:,} pixels are over {settings.max_pixels:,}", "image")
            picture = decode_rgb(data)
        except (PictureError, OSError, SyntaxError, ValueError) as error:
            text = str(error) if isinstance(error, PictureError) else "no picture of a known format"
            raise ApiError(400, "bad_image", text, "image") from None
        name = re.sub(r"[^\w .()+-]", "_", Path(name.replace("\\", "/")).name)[:120] or "picture"
        self.store.add_image(image_id, data, name, (picture.height, picture.width))
        return self.store.image(image_id)


def decoded(text: str) -> bytes:
    """The bytes of base64 or of a data URI; ApiError where it is neither. Addresses are not fetched."""
    if text.startswith(("http:", "https:", "file:")):
        raise ApiError(422, "bad_prompt", "addresses are not fetched; send the picture itself", "image")
    text = re.sub(r"^data:[^,]*,", "", text)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "bad_image", "not base64", "image") from None
