#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The service under load on loopback: right answers, their times, flat memory, and what a full queue says.

Example:
    python3 tests/service_load.py --seconds 120 --pictures 1000

Starts sam3_serve.py on the tiny checkpoint: 16 clients ask words and clicks of 8 pictures, and compare every answer
with a serial run; then many pictures go through a small cache while the process's memory is read; then more clients
come than the queue holds.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "assets" / "tiny_sam3")]

import psutil  # noqa: E402
from serving import picture_bytes, service  # noqa: E402

PHRASES = ("circle", "star", "red square", "small cross")
CLICKS = ((160, 120), (60, 60), (250, 180))


def ask(client, image_id: str, what):
    """(seconds, answer without its times) of a phrase or a click."""
    if isinstance(what, str):
        path, body = "text", {"prompts": [what]}
    else:
        path, body = "points", {"points": [{"x": what[0], "y": what[1]}]}
    started = time.perf_counter()
    answer = client.post(f"/v1/segment/{path}", json={"image_id": image_id, "save": False} | body)
    seconds = time.perf_counter() - started
    return seconds, answer.status_code, answer.json().get("results")


def send(client, data: bytes) -> str:
    return client.post("/v1/images", content=data, headers={"Content-Type": "image/png"}).json()["image_id"]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1000


def mixed(client, seconds: float, clients: int) -> None:
    """The first part."""
    ids = [send(client, picture_bytes(seed)) for seed in range(8)]
    right = {(one, what): ask(client, one, what)[2] for one in ids for what in (*PHRASES, *CLICKS)}
    times: dict[str, list[float]] = {"words": [], "click": []}
    wrong, statuses, end, lock = Counter(), Counter(), time.monotonic() + seconds, threading.Lock()

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            question = rng.choice(list(right))
            took, status, found = ask(client, *question)
            with lock:
                statuses[status] += 1
                times["words" if isinstance(question[1], str) else "click"].append(took)
                wrong[status == 200 and found != right[question]] += 1

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    print(
        f"{clients} clients, 8 pictures, {seconds:.0f} s: {sum(statuses.values())} answers, statuses {dict(statuses)}"
    )
    print(f"wrong answers: {wrong[True]}")
    for kind, values in times.items():
        p50, p95 = (percentile(values, share) for share in (0.5, 0.95))
        print(f"{kind:6s} {len(values):6d} answers, p50 {p50:6.0f} ms, p95 {p95:6.0f} ms")


def flat(client, process, pictures: int) -> None:
    """The second part: memory after a tenth of the pictures, and at the end."""
    memory, first = psutil.Process(process.pid), None
    for number in range(pictures):
        image_id = send(client, picture_bytes(1000 + number))
        ask(client, image_id, CLICKS[0])
        if number == pictures // 10:
            first = memory.memory_info().rss
    last = memory.memory_info().rss
    cache = client.get("/v1/stats").json()["devices"][0]["cache"]
    print(f"{pictures} pictures, cache {cache['bytes'] / 1e6:.1f} of {cache['max_bytes'] / 1e6:.0f} MB, evictions "
          f"{cache['evictions']}: {first / 2**20:.0f} MiB after a tenth, {last / 2**20:.0f} MiB at the end, "
          f"{(last - first) / first:+.1%}")  # fmt: skip


def full(client, clients: int) -> None:
    """The third part."""
    image_id = send(client, picture_bytes(1))
    with ThreadPoolExecutor(clients) as pool:
        statuses = Counter(status for _, status, _ in pool.map(lambda _: ask(client, image_id, "star"), range(clients)))
    print(f"{clients} clients at once, a queue of 4: {dict(statuses)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pictures", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with service(Path(folder) / "load") as (client, _):
            mixed(client, args.seconds, args.clients)
        with service(Path(folder) / "flat", "--cache_mb", "5") as (client, process):
            flat(client, process, args.pictures)
        with service(Path(folder) / "full", "--queue_size", "4") as (client, _):
            full(client, 60)


if __name__ == "__main__":
    main()
