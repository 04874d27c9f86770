# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Speed as measured (latencies, ais_bench's own figures) and as it could be: what a chip can do at most."""

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.stages import seconds_by_stage


@dataclass(frozen=True)
class Chip:
    """What a chip can do at most, and who says so.

    `peak` in FLOP/s of matrix products of `dtype`, 2 for each multiply-add; `bandwidth` of its memory in bytes/s, or
    None where it is not known.
    """

    peak: float
    dtype: str
    bandwidth: float | None
    source: str


# By CANN's platform files (<toolkit>/data/platform_config/<SoC>.ini): the cube unit of a core does 16 x 16 x 16
# multiply-adds in a cycle; ddr_rate is the bytes a core gets from memory in a cycle.
CHIPS = {
    # ai_core_cnt=8 at cube_freq=1060 with ddr_rate=17, and 7 vector cores at 1000 MHz with 9 bytes. Atlas 300I Duo,
    # which carries two of these chips, is sold with 408 GB/s.
    "Ascend310P3": Chip(
        2 * 8 * 16**3 * 1.06e9, "float16", 8 * 17 * 1.06e9 + 7 * 9 * 1.00e9, "CANN platform_config/Ascend310P3.ini"
    ),
    # cube_core_cnt=20 at cube_freq=1500 with ddr_rate=32. Published bandwidths lie between 400 and 1200 GB/s.
    "Ascend910B4": Chip(2 * 20 * 16**3 * 1.5e9, "float16", 20 * 32 * 1.5e9, "CANN platform_config/Ascend910B4.ini"),
}
# (rows, inner, columns): square, large enough for every core of a server, and the MLP of facebook/sam3's ViT.
GEMM_SHAPES = ((2048, 2048, 2048), (5184, 1024, 4736))
GEMM_RUNS = 6
NUMBER = r"[\d.]+(?:[eE][+-]?\d+)?"


def _products(runtime: str, dtype: str):
    """(FLOP, a function that computes them) for each of `GEMM_SHAPES`, by the library that runs the model.

    numpy's products reach half of ONNX Runtime's where its BLAS does not know the CPU. OpenVINO multiplies with oneDNN,
    as PyTorch does.
    """
    import numpy as np

    for rows, inner, columns in GEMM_SHAPES:
        rng = np.random.default_rng(0)
        pair = [rng.random(shape, dtype=np.float32) for shape in ((rows, inner), (inner, columns))]
        if runtime == "onnx":
            import onnx
            import onnxruntime

            text = (
                f'<ir_version: 8, opset_import: ["": 17]> product (float[{rows},{inner}] a, float[{inner},{columns}] b)'
                f" => (float[{rows},{columns}] c) {{ c = MatMul (a, b) }}"
            )
            session = onnxruntime.InferenceSession(
                onnx.parser.parse_model(text).SerializeToString(), providers=["CPUExecutionProvider"]
            )
            multiply = partial(session.run, None, dict(zip("ab", pair)))
        else:
            import torch

            multiply = partial(torch.matmul, *(torch.from_numpy(array).to(getattr(torch, dtype)) for array in pair))
        yield 2 * rows * inner * columns, multiply


def measured_cpu(runtime: str, dtype: str) -> Chip:
    """This machine's CPU, its peak being the fastest of several matrix products.

    What else runs on the machine only makes them slower, hence the fastest.

    Args:
        runtime: "torch", "openvino" or "onnx". dtype: "float32", or what the first two compute in.
    """
    rates = []
    for flops, multiply in _products(runtime, dtype):
        for _ in range(GEMM_RUNS):
            started = time.perf_counter()
            multiply()
            rates.append(flops / (time.perf_counter() - started))
    library = "ONNX Runtime" if runtime == "onnx" else "PyTorch"
    source = f"the fastest of {len(rates)} products of {len(GEMM_SHAPES)} shapes by {library} in this run"
    return Chip(max(rates), dtype, None, source)


def bounds(chip: Chip, flops: float, least_bytes: float) -> dict:
    """The chip, and the pictures a second that it cannot exceed.

    Args:
        flops, least_bytes: FLOP and memory traffic of one picture, as `flops.work_of` gives them.

    Returns:
        The chip's fields, `compute_fps`, and `bandwidth_fps` (None where the bandwidth is not known). Real traffic is
        larger by every intermediate result that does not stay on the chip: the second bound is far from tight.
    """
    bandwidth_fps = None if chip.bandwidth is None else chip.bandwidth / least_bytes
    return asdict(chip) | {"compute_fps": chip.peak / flops, "bandwidth_fps": bandwidth_fps}


def machine() -> dict:
    """The computer, and what the NPU's driver says of itself where one is installed."""
    found = {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):  # aarch64 has no such line
            found["cpu"] = line.split(":", 1)[1].strip()
    driver = Path("/usr/local/Ascend/driver/version.info")
    return found | ({"npu_driver": driver.read_text(encoding="utf-8").split()} if driver.is_file() else {})


def prepared_feeds(shapes, batch: int) -> dict:
    """Inputs by the contract: random pictures in -1..1, and a phrase of three tokens.

    No tokenizer is needed: every vocabulary has the id 1. A mask of zeros, which ais_bench feeds, would leave the
    attention nothing to attend to.
    """
    import numpy as np

    from sam3_utils.contract import TEXT_LENGTH

    side = shapes.image_size
    pictures = 2 * np.random.default_rng(0).random((batch, 3, side, side), dtype=np.float32) - 1
    tokens = np.zeros((batch, TEXT_LENGTH), dtype=np.int64)
    tokens[:, :3] = 1
    return {"pixel_values": pictures, "input_ids": tokens, "attention_mask": tokens}


def phrase(number: int):
    """Token ids of a phrase, int64 x 32, another one for every number below 2**32; every vocabulary has its ids."""
    import numpy as np

    from sam3_utils.contract import TEXT_LENGTH

    return 1 + (number >> np.arange(TEXT_LENGTH)) % 2


def measure(model, batch: int, loop: int, warmup_count: int) -> dict[str, list[float]]:
    """Time `loop` batches after `warmup_count` others, each row with a new picture and phrase: nothing is remembered.

    Args:
        model: from `backends.open_model`.

    Returns:
        Milliseconds of each loop. "infer": the wall time of `model.infer`, which checks what goes in and comes out,
        and for an OM copies it to the NPU and back. Of a checkpoint also its stages, such as "vision". For an OM also
        "NPU compute", `sessions.OmSession.compute_times`. The stages of a split model: `measure_parts`.
    """
    import numpy as np
    from tqdm import trange

    from sam3_utils.backends import SplitModel

    feeds = prepared_feeds(model.shapes, batch)
    milliseconds: dict[str, list[float]] = {"infer": []}
    for index in trange(warmup_count + loop, unit="batch", disable=None):
        feeds["pixel_values"] = np.roll(feeds["pixel_values"], 1, axis=-1)
        feeds["input_ids"] = np.stack([phrase(index * batch + row) for row in range(batch)])
        before = seconds_by_stage()
        started = time.perf_counter()
        model.infer(feeds)
        seconds = {"infer": time.perf_counter() - started}
        if model.runtime == "torch":
            seconds |= {name: value - before.get(name, 0) for name, value in seconds_by_stage().items()}
        for name, value in seconds.items():
            milliseconds.setdefault(name, []).append(1000 * value)
    measured = {name: values[-loop:] for name, values in milliseconds.items()}
    if model.runtime == "om" and not isinstance(model, SplitModel):
        measured["NPU compute"] = model.compute_times()[-loop:]
    return measured


def measure_parts(model, batch: int, loop: int, warmup_count: int) -> dict[str, tuple[int, list[float]]]:
    """Time the parts of a split model: what a picture costs, what a phrase costs, what their pairs cost.

    Args:
        model: a `backends.SplitModel`.
        batch: phrases that the detector gets with one picture.

    Returns:
        name -> (how many at once, milliseconds of each loop): "vision" of one picture, "text" of one phrase, "detector"
        of `batch` phrases on one picture. Every loop has a new picture and a new phrase: nothing is remembered. Of OMs
        also "vision, NPU" and so on, `sessions.OmSession.compute_times`, the detector's summed up where `batch` phrases
        take several runs.
    """
    import numpy as np
    from tqdm import trange

    picture, _, mask = (array[0] for array in prepared_feeds(model.shapes, 1).values())
    counts = {"vision": 1, "text": 1, "detector": batch}
    milliseconds: dict[str, list[float]] = {part: [] for part in counts}
    runs, used = warmup_count + loop, (warmup_count + loop) * batch  # `used`: phrases that `measure` has taken
    for number in trange(used, used + runs, unit="batch", disable=None):
        picture, tokens = np.roll(picture, 1, axis=-1), phrase(number)
        clock = [time.perf_counter()]
        levels = model.encode_picture(picture)
        clock.append(time.perf_counter())
        features = model.encode_phrase(tokens, mask)
        clock.append(time.perf_counter())
        model.detect(levels, np.repeat(features, batch, axis=0), np.repeat(mask[None], batch, axis=0))
        clock.append(time.perf_counter())
        for part, start, end in zip(counts, clock, clock[1:]):
            milliseconds[part].append(1000 * (end - start))
    measured = {part: (count, milliseconds[part][-loop:]) for part, count in counts.items()}
    if model.runtime == "om":
        times_of = model.compute_times()
        for part, count in counts.items():
            calls = math.ceil(count / model.batch_size) if part == "detector" else 1
            sums = np.reshape(times_of[part][-loop * calls :], (loop, calls)).sum(axis=1)
            measured[f"{part}, NPU"] = count, sums.tolist()
    return measured


def end_to_end(arguments: list[str]) -> dict:
    """Run sam3_coco_iou_eval.py with these arguments into a folder that is thrown away; returns its summary.

    Raises:
        UsageError: it refused them.
        CheckFailed: it failed.
    """
    script = Path(__file__).resolve().parent.parent / "sam3_coco_iou_eval.py"
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, str(script), *arguments, "--output_dir", folder, "--overwrite"],
            stdout=subprocess.DEVNULL, stderr=None if sys.stderr.isatty() else subprocess.PIPE, text=True,
        )  # fmt: skip
        if result.returncode:
            reason = (result.stderr or "see above").strip().splitlines()[-1].removeprefix(f"{script.name}: error: ")
            raise (UsageError if result.returncode == 2 else CheckFailed)(reason)
        return json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))


def latency_row(name: str, milliseconds: list[float], batch: int) -> dict:
    """Statistics of the latencies of one batch; percentiles are interpolated linearly, fps = batch / median."""
    import numpy as np

    median, p90, p99 = map(float, np.percentile(milliseconds, (50, 90, 99)))
    return {
        "name": name, "batch": batch, "loops": len(milliseconds), "mean_ms": float(np.mean(milliseconds)),
        "median_ms": median, "p90_ms": p90, "p99_ms": p99, "fps": 1000 * batch / median,
    }  # fmt: skip


def _ais_bench_row(name: str, batch: float, throughput: float, times: dict, p90: float | None) -> dict:
    if batch < 1 or batch % 1 or not throughput > 0:
        raise ValueError(f"mean batch {batch:g}, throughput {throughput:g}")
    said = {
        "mean_ms": times["mean"], "median_ms": times.get("median"), "p90_ms": p90,
        "p99_ms": times.get("percentile(99%)"),
    }  # fmt: skip
    numbers = {key: value if value is None else float(value) for key, value in said.items()}
    loops = times.get("count")
    return {"name": name, "batch": int(batch), "loops": loops and int(loops), **numbers, "fps": throughput}


def _from_summary(text: str) -> list[dict]:
    import numpy as np

    content = json.loads(text)
    times, throughput = content["NPU_compute_time"], content["throughput"]
    # With threads the list holds (start, end) pairs instead of durations.
    p90 = float(np.percentile(content["npu_compute_time_list"], 90)) if "median" in times else None
    # The batch is not in the file, but throughput = 1000 * batch / mean.
    return [_ais_bench_row("ais_bench", round(throughput * times["mean"] / 1000, 6), throughput, times, p90)]


def _from_log(text: str) -> list[dict]:
    lines = [line for line in text.splitlines() if "NPU_compute_time" in line or "throughput:" in line]
    statistics, devices, rows = {}, {}, []
    for line in lines:
        if "NPU_compute_time (ms): " in line:
            found = {key: float(value) for key, value in re.findall(rf"([\w()%]+) = ({NUMBER})", line)}
            # Several devices print between each other: the mean says which throughput belongs here.
            statistics[found["mean"]] = found
        elif match := re.search(rf"device_(\d+) throughput:({NUMBER})", line):
            devices[float(match[2])] = match[1]
    for line in lines:
        pattern = rf"throughput 1000\*batchsize\.mean\(({NUMBER})\)/NPU_compute_time\.mean\(({NUMBER})\): ({NUMBER})"
        if match := re.search(pattern, line):
            batch, mean, throughput = map(float, match.groups())
            name = f"ais_bench, device {devices[throughput]}" if throughput in devices else "ais_bench"
            rows.append(_ais_bench_row(name, batch, throughput, statistics[mean], None))
    return rows


def read_ais_bench(path: Path) -> list[dict]:
    """ais_bench's own figures, a row for each device, as `latency_row` has them.

    fps is ais_bench's throughput, which is batch / mean and never the sum over devices. What ais_bench does not say is
    None: with --threads above 1 all but the mean, and p90 in what it prints.

    Args:
        path: the `<name>_summary.json` that `python3 -m ais_bench --output` writes, or what the command printed.

    Raises:
        UsageError: the file holds neither, or the run came to nothing.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give ais_bench's _summary.json, or what the command printed")
    text = path.read_text(encoding="utf-8", errors="replace")  # reads the \r that ends a progress bar as a new line
    try:
        rows = _from_summary(text) if text.lstrip().startswith("{") else _from_log(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a usable summary of ais_bench ({type(error).__name__}: {error})") from None
    if not rows:
        raise UsageError(f"{path}: no summary of ais_bench; give its _summary.json, or all that the command printed")
    return rows
