# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""One thread for each device, which alone touches its model; jobs wait for it in a queue of bounded length."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from sam3_utils.predictor import Predictor

logger = logging.getLogger(__name__)


class Busy(Exception):
    """The queue is full; come back later."""


class NotReady(Exception):
    """The model is being loaded, or could not be; the text says which."""


class DeviceThread(threading.Thread):
    """Loads a model, warms it up, then answers jobs one by one."""

    def __init__(self, make: Callable[[], Predictor], warm_up: Callable[[Predictor], None], queue_size: int):
        """
        Args:
            make: makes the predictor, in this thread. warm_up: asks it something.
            queue_size: how many jobs may wait.
        """
        super().__init__(daemon=True)
        self._make, self._warm_up = make, warm_up
        self._jobs: queue.Queue = queue.Queue(queue_size)
        self.predictor: Predictor | None = None
        self.state, self.error = "loading", None
        self.times: dict[str, deque] = {}  # stage -> its last 1000 times in milliseconds

    def run(self) -> None:
        """Until `stop`."""
        try:
            predictor = self._make()
            self._warm_up(predictor)
        except Exception as error:  # kept for /readyz and the log; the service stays up to say so
            self.state, self.error = "failed", error
            logger.error("the model cannot be used: %s", error)
            return
        self.predictor, self.state = predictor, "ready"
        while (job := self._jobs.get()) is not None:
            work, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(predictor))
                except BaseException as error:
                    future.set_exception(error)
        self.state = "stopped"
        predictor.model.close()

    def submit(self, work: Callable[[Predictor], object]) -> Future:
        """Queue a job, a function of the predictor.

        Raises:
            NotReady: the model is not there. Busy: the queue is full.
        """
        if self.state != "ready":
            raise NotReady(str(self.error) if self.error else self.state)
        future: Future = Future()
        try:
            self._jobs.put_nowait((work, future))
        except queue.Full:
            raise Busy(f"{self._jobs.maxsize} requests are waiting") from None
        return future

    def waiting(self) -> int:
        """How many jobs wait."""
        return self._jobs.qsize()

    def timed(self, stage: str, started: float) -> float:
        """Note how long a stage took since `time.perf_counter()` said `started`; returns milliseconds."""
        milliseconds = (time.perf_counter() - started) * 1000
        self.times.setdefault(stage, deque(maxlen=1000)).append(milliseconds)
        return round(milliseconds, 2)

    def stop(self) -> None:
        """Answer what is queued, then end."""
        if self.is_alive() and self.state == "ready":
            self._jobs.put(None)
            self.join()
