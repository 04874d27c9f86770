# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_benchmark.py as a user runs it: three runtimes, ais_bench's files, rooflines, refusals. No speed is asserted."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import ROOT, STANDINS, TINY, error_line, run_script
from make_om import make_om
from test_convert_om import convert

from sam3_utils import contract, flops, graph, speed
from sam3_utils.backends import open_model
from sam3_utils.cli import UsageError
from sam3_utils.files import sha256

LOOPS = 4


def benchmark(*arguments, code: int = 0, **options):
    result = run_script("sam3_benchmark.py", *arguments, **options)
    assert result.returncode == code, result.stderr
    return result


def markdown(text: str) -> list[list[str]]:
    """Rows of the table for README, its head checked."""
    head, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    assert head == "| Chip | Model | Batch size | Speed (fps) | Note |"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def percentile(values: list[float], percent: float) -> float:
    """By definition: linear between the two nearest ranks."""
    ordered, position = sorted(values), percent / 100 * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@pytest.fixture(scope="module")
def converted(tmp_path_factory, onnx_path):
    """An OM of batch 2 with its manifest, as sam3_convert_om.sh leaves them in ./sam3_om, beside ./sam3_onnx_300I."""
    folder = tmp_path_factory.mktemp("converted")
    shutil.copytree(onnx_path.parent, folder / "sam3_onnx_300I")
    path = os.pathsep.join((str(Path(sys.executable).parent), str(STANDINS), os.environ["PATH"]))
    guide = {"PATH": path, "TARGET_DEVICE": "300I", "BATCH_SIZE": "2", "SOC_VERSION": "Ascend310P3"}
    command = ["bash", str(ROOT / "sam3_convert_om.sh")]
    result = subprocess.run(command, cwd=folder, env=os.environ | guide, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [om] = (folder / "sam3_om").glob("*.om")
    return om


@pytest.fixture(scope="module")
def runs(tmp_path_factory, onnx_path, converted):
    """Runtime -> (what a run printed, its report)."""
    folder, found = tmp_path_factory.mktemp("reports"), {}
    for runtime, path, more in (
        ("torch", TINY, ("--dtype", "float32")), ("onnx", onnx_path, ("--batch_size", 3)), ("om", converted, ()),
    ):  # fmt: skip
        report = folder / "new" / f"{runtime}.json"
        printed = benchmark("--model_path", path, "--loop", LOOPS, "--warmup_count", 2, "--report", report, *more)
        found[runtime] = printed, json.loads(report.read_text())
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["om.json", "onnx.json", "torch.json"]
    return found


@pytest.mark.parametrize("runtime, batch", [("torch", 1), ("onnx", 3), ("om", 2)])
def test_latencies_and_fps_follow_from_the_single_runs_on_record(runs, runtime, batch):
    printed, record = runs[runtime]
    names = ["infer"] + {"om": ["NPU compute"], "torch": ["vision", "text and detector"]}.get(runtime, [])
    assert [row["name"] for row in record["measurements"]] == names and set(record["milliseconds"]) == set(names)
    for row in record["measurements"]:
        times = record["milliseconds"][row["name"]]
        assert len(times) == row["loops"] == LOOPS and row["batch"] == record["batch_size"] == batch and min(times) > 0
        for key, percent in (("median_ms", 50), ("p90_ms", 90), ("p99_ms", 99)):
            assert row[key] == pytest.approx(percentile(times, percent), rel=1e-9)
        assert row["fps"] == pytest.approx(1000 * batch / row["median_ms"], rel=1e-9)
        line = next(line for line in printed.stdout.splitlines() if line.startswith(f"{row['name']} "))
        figures = line[len(row["name"]) :].split()
        assert figures[:2] == [str(batch), str(LOOPS)] and figures[2] == f"{row['median_ms']:.2f}"
        assert figures[5] == f"{row['fps']:.4f}"
    # ais_bench's figures leave the copies out: for README only the row that compares with them.
    shown = record["measurements"][-1 if runtime == "om" else 0]
    assert [row[2:4] for row in markdown(printed.stdout)] == [[str(batch), f"{shown['fps']:.4f}"]]


def test_an_om_s_compute_time_leaves_the_copies_out(runs):
    times = runs["om"][1]["milliseconds"]
    assert all(compute < whole for compute, whole in zip(times["NPU compute"], times["infer"]))


@pytest.mark.parametrize("runtime", ["torch", "onnx", "om"])
def test_the_report_says_what_was_measured_on_what(runs, runtime, onnx_path, converted):
    printed, record = runs[runtime]
    assert "sam3_benchmark.py --model_path" in record["command"] and record["warmup_count"] == 2
    assert record["model"]["runtime"] == runtime and record["device"] == ("0" if runtime == "om" else "cpu")
    files = {"torch": TINY / "model.safetensors", "onnx": onnx_path, "om": converted}
    assert record["model"]["sha256"][files[runtime].name] == sha256(files[runtime])
    assert record["versions"]["onnxruntime"] and record["machine"]["cores"] >= 1 and record["machine"]["cpu"]
    memory = record["host_memory_mib"]
    assert 0 < memory["before"] <= memory["opened"] <= memory["peak"]
    assert record["work"]["graph"]["opset"] == {"ai.onnx": 17}
    for line in printed.stdout.splitlines():
        assert len(line) <= 100 or line.startswith(("|", "report: ")), line


@pytest.mark.parametrize("runtime", ["torch", "onnx", "om"])
def test_the_work_is_that_of_the_exported_graph(runs, runtime, onnx_path):
    work = runs[runtime][1]["work"]
    counts = flops.count_flops(graph.load_structure(onnx_path), 1)
    assert work["operators"] == counts["operators"] and work["parts"] == counts["parts"]
    assert work["flops"] == sum(counts["operators"].values())


def test_an_om_s_roofline_is_its_chip_s(runs):
    _, record = runs["om"]
    # 8 cores x 16^3 multiply-adds x 2 x 1.06 GHz
    assert record["chip"] == "Ascend310P3" and record["roofline"]["peak"] == pytest.approx(69.47e12, rel=1e-4)
    assert record["roofline"]["compute_fps"] == pytest.approx(69.47e12 / record["work"]["flops"], rel=1e-4)
    assert record["roofline"]["bandwidth_fps"] == pytest.approx(207.2e9 / record["work"]["least_bytes"], rel=1e-3)
    assert "precision_mode_v2=fp16" in runs["om"][0].stdout
    chip = speed.CHIPS["Ascend910B4"]
    assert (chip.peak, chip.bandwidth) == pytest.approx((245.76e12, 960e9), rel=1e-9)


def test_float16_weights_shared_by_a_batch_are_moved_as_such(runs):
    """Of one picture: all float32 weights with PyTorch at batch 1, a quarter of their bytes with an OM of batch 2."""
    every = 4 * 3 * 224 * 224 + 2 * 8 * 32 + 4 * (16 * 64 * 64 + 16 + 16 * 4 + 1 + 64 * 64)  # inputs and outputs
    weights = runs["torch"][1]["work"]["least_bytes"] - every
    # 1.49 M parameters, the table of 561 x 64 tokens and what only the tracker uses not among them
    assert 4 * 1.0e6 < weights < 4 * 1.49e6
    assert runs["om"][1]["work"]["least_bytes"] - every == pytest.approx(weights / 4, rel=1e-3)


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_a_cpu_s_peak_is_measured_in_the_same_run(runs, runtime):
    printed, record = runs[runtime]
    bound = record["roofline"]
    library = {"torch": "PyTorch", "onnx": "ONNX Runtime"}[runtime]
    assert bound["dtype"] == "float32" and library in bound["source"] and bound["bandwidth_fps"] is None
    assert 1e9 < bound["peak"] < 1e14  # between a slow core and more than any CPU has
    share = record["measurements"][0]["fps"] / bound["compute_fps"]
    assert re.search(rf"^infer .* {100 * share:.1f}%$", printed.stdout, re.MULTILINE)


def test_a_split_model_is_timed_part_by_part(tmp_path, exported_split, onnx_path):
    folder, report = exported_split["300I"], tmp_path / "report.json"
    printed = benchmark("--model_path", folder, "--loop", LOOPS, "--batch_size", 3, "--report", report)
    record = json.loads(report.read_text())
    rows = {row["name"]: row for row in record["measurements"]}
    assert {name: row["batch"] for name, row in rows.items()} == {"infer": 3, "vision": 1, "text": 1, "detector": 3}
    for name, row in rows.items():
        assert len(record["milliseconds"][name]) == row["loops"] == LOOPS
        assert row["fps"] == pytest.approx(1000 * row["batch"] / row["median_ms"])
    assert record["manifest"]["layout"] == "split" and len(record["work"]["graph"]) == 3
    # Cut, not added to: the single graph's work, and each part's share by its own graph.
    assert record["work"]["flops"] == sum(flops.count_flops(graph.load_structure(onnx_path), 1)["parts"].values())
    for part in contract.SPLIT:
        own = sum(flops.count_flops(graph.load_structure(folder / f"sam3_{part}.onnx"), 1)["parts"].values())
        share = rows[part]["fps"] * own / record["roofline"]["peak"]
        assert re.search(rf"^{part} .* {100 * share:.1f}%$", printed.stdout, re.MULTILINE)
    assert markdown(printed.stdout)[0][3] == f"{rows['infer']['fps']:.4f}" and len(markdown(printed.stdout)) == 1


def test_every_loop_of_a_split_model_runs_every_part_and_nothing_is_remembered(exported_split, monkeypatch):
    model, runs = open_model(exported_split["300I"]), []
    for part, session in model._sessions.items():
        run = session.run
        monkeypatch.setattr(session, "run", lambda feeds, names, part=part, run=run: runs.append(
            (part, len(feeds.get("text_features", "x")))) or run(feeds, names))  # fmt: skip
    speed.measure(model, 2, 2, 1)
    assert runs == [("vision", 1), ("text", 1), ("detector", 1)] * 2 * 3
    runs.clear()
    speed.measure_parts(model, 5, 2, 1)
    assert runs == [("vision", 1), ("text", 1), ("detector", 5)] * 3


def test_phrases_differ_for_every_loop_and_their_tokens_exist_in_a_small_vocabulary():
    phrases = [speed.phrase(number) for number in range(5000)]
    assert len({tokens.tobytes() for tokens in phrases}) == 5000
    assert {int(token) for tokens in phrases for token in tokens} == {1, 2}
    assert (phrases[0].dtype.name, phrases[0].shape) == ("int64", (contract.TEXT_LENGTH,))


def test_a_split_om_is_timed_with_and_without_copies_and_gets_its_chip_s_roofline(tmp_path, exported_split):
    shutil.copytree(exported_split["300I"], tmp_path / "sam3_onnx_300I")
    assert convert(tmp_path, batches="2").returncode == 0
    path, report = tmp_path / "sam3_om" / "sam3_split_300I_bs2.json", tmp_path / "report.json"
    printed = benchmark("--model_path", path, "--loop", LOOPS, "--batch_size", 3, "--report", report)
    record = json.loads(report.read_text())
    names = ["infer", "vision", "text", "detector", "vision, NPU", "text, NPU", "detector, NPU"]
    assert [row["name"] for row in record["measurements"]] == names
    times = record["milliseconds"]
    for part in contract.SPLIT:  # of the detector two runs, for three phrases by two
        assert len(times[part]) == len(times[f"{part}, NPU"]) == LOOPS
        assert all(0 < compute < whole for compute, whole in zip(times[f"{part}, NPU"], times[part]))
    assert record["chip"] == "Ascend310P3" and record["roofline"]["peak"] == pytest.approx(69.47e12, rel=1e-4)
    assert "not known" not in printed.stdout and "precision_mode_v2=fp16" in printed.stdout
    assert [row[4] for row in markdown(printed.stdout)] == ["model alone, infer, precision_mode_v2=fp16"]
    quick("--model_path", path, "--soc_version", "Ascend310P3", "--onnx_path", tmp_path / "sam3_onnx_300I")
    text = tmp_path / "sam3_onnx_300I" / "sam3_text.onnx"
    model = onnx.load(text, load_external_data=False)
    model.doc_string = "another file"
    text.write_bytes(model.SerializeToString())
    printed = quick("--model_path", path)
    assert "gone or another file by now" in printed.stderr
    assert "not known: the work of a picture: name its graph with --onnx_path" in printed.stdout
    text.write_text("not onnx")
    line = error_line(run_script("sam3_benchmark.py", "--model_path", TINY, "--onnx_path", text.parent))
    assert "sam3_text.onnx: cannot be read as ONNX" in line


def test_an_evaluation_is_timed_from_file_to_result(tmp_path, onnx_path, demo_data):
    report = tmp_path / "report.json"
    more = ("--processor_path", TINY, "--coco_root", demo_data, "--max_samples", 3, "--report", report)
    result = run_script("sam3_benchmark.py", "--model_path", onnx_path, *more)
    assert result.returncode == 0, result.stderr
    summary = json.loads(report.read_text())["summary"]
    pairs = summary["samples"] + summary["presence"]["absent"]
    assert f"{pairs} pairs of picture and phrase in {summary['seconds']:.1f} s: {pairs / summary['seconds']:.3f} a" in (
        result.stdout
    )
    assert set(summary["seconds_by_stage"]) == {"decode", "prepare", "model", "masks and IoU", "write"}
    assert f"peak memory: {summary['peak_memory_mib']} MiB" in result.stdout
    refused = run_script("sam3_benchmark.py", "--model_path", onnx_path, *more[:1], TINY, "--coco_root", tmp_path)
    assert str(tmp_path) in error_line(refused)
    assert "give --model_path and --processor_path" in error_line(
        run_script("sam3_benchmark.py", "--model_path", onnx_path, "--coco_root", demo_data)
    )


def test_facebook_sam3_s_bounds_are_those_of_the_published_peaks():
    """6.05 TFLOP a picture: the guide's best figures are about 15 % and 12 % of what the chips could do."""
    for chip, bound, guide, share in (("Ascend310P3", 11.48, 1.6882, 0.147), ("Ascend910B4", 40.62, 4.9664, 0.122)):
        found = speed.bounds(speed.CHIPS[chip], 6.05e12, 2e9)["compute_fps"]
        assert found == pytest.approx(bound, rel=1e-3)
        assert guide / found == pytest.approx(share, abs=5e-4)


def test_prepared_inputs_fit_the_contract_and_mask_nothing_out_entirely():
    shapes = contract.ModelShapes(224, 16, 64, None)
    feeds = speed.prepared_feeds(shapes, 3)
    contract.check_feeds(feeds, contract.single_inputs(shapes))
    assert (feeds["attention_mask"].sum(1) == 3).all() and feeds["input_ids"].max() == 1
    assert -1 <= feeds["pixel_values"].min() < -0.9 and 0.9 < feeds["pixel_values"].max() <= 1


def test_defaults_are_twenty_runs_after_three():
    text = run_script("sam3_benchmark.py", "--help").stdout
    assert re.search(r"--loop LOOP\s+timed runs \(default: 20\)", text)
    assert re.search(r"--warmup_count WARMUP_COUNT\s+runs before them, which do not count\s+\(default: 3\)", text)


def quick(*arguments, **options):
    return benchmark(*arguments, "--loop", 1, "--warmup_count", 1, **options)


def test_an_om_without_manifest_gets_its_roofline_by_flags(tmp_path, onnx_path):
    om = tmp_path / "alone.om"
    make_om(onnx_path, om, 1)
    printed = quick("--model_path", om)
    assert "not known: the work of a picture: name its graph with --onnx_path" in printed.stdout
    assert "not known: the peak of NPU; --soc_version takes Ascend310P3, Ascend910B4" in printed.stdout
    assert markdown(printed.stdout)[0][:3] == ["NPU", "alone", "1"]
    printed = quick("--model_path", om, "--soc_version", "Ascend910B4", "--onnx_path", onnx_path)
    assert "not known" not in printed.stdout and "peak of Ascend910B4: 245.8 TFLOP/s in float16" in printed.stdout


def test_an_onnx_file_changed_since_the_conversion_is_not_taken_for_the_om_s(tmp_path, converted):
    folder = tmp_path / "copy"
    shutil.copytree(converted.parent.parent, folder)
    onnx_path = folder / "sam3_onnx_300I" / "sam3.onnx"
    model = onnx.load(onnx_path, load_external_data=False)
    model.doc_string = "another file"
    onnx_path.write_bytes(model.SerializeToString())
    printed = quick("--model_path", folder / "sam3_om" / converted.name)
    assert "gone or another file by now" in printed.stderr
    assert "not known: the work of a picture" in printed.stdout and "% " not in printed.stdout


def test_a_graph_that_cannot_be_counted_is_a_failure_where_it_was_asked_for(tmp_path, onnx_path):
    text = "g (float[N,M] x) => (float[N,M] y) { y = MatMul (x, x) }"
    other = tmp_path / "free.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'), other)
    printed = quick("--model_path", onnx_path, "--onnx_path", other, code=1)
    assert "not known: the work of a picture" in printed.stdout and markdown(printed.stdout)


def test_answers_that_are_no_numbers_are_no_result(tmp_path, onnx_path):
    model = onnx.load(onnx_path)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("layer_norm.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(tuple(bias.dims), np.nan, np.float32), bias.name))
    onnx.save(model, tmp_path / "nan.onnx")
    result = quick("--model_path", tmp_path / "nan.onnx", "--report", tmp_path / "r.json", code=1)
    assert "non-finite" in result.stderr and "Traceback" not in result.stderr and not (tmp_path / "r.json").exists()


REFUSED = {
    "nothing to measure": ((), "give a model, or --ais_bench_summary"),
    "no such model": (("--model_path", "nowhere.om"), "nothing matches"),
    "another batch than the OM's": (("--model_path", "{om}", "--batch_size", 4), "give --batch_size 2"),
    "a chip for a CPU": (("--model_path", "{onnx}", "--soc_version", "Ascend310P3"), "does not run on an NPU"),
    "an unknown chip": (("--model_path", "{om}", "--soc_version", "Ascend310"), "invalid choice"),
    "a report of another kind": (("--model_path", "{onnx}", "--report", "r.csv"), "must end in .json"),
    "a graph that is none": (("--model_path", "{om}", "--onnx_path", "{om}"), "ONNX"),
    "no runs": (("--model_path", "{onnx}", "--loop", 0), "not a positive whole number"),
    "a type for a graph": (("--model_path", "{onnx}", "--dtype", "float16"), "only a checkpoint folder"),
    "no such summary": (("--ais_bench_summary", "none.json"), "no such file"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_line(arguments, message, onnx_path, converted, tmp_path):
    known = {"{om}": converted, "{onnx}": onnx_path}
    result = run_script("sam3_benchmark.py", *(known.get(argument, argument) for argument in arguments), cwd=tmp_path)
    assert message in error_line(result)


# ais_bench's files

TIMES = [2350.5, 2351.25, 2349.75, 2400.0, 2352.5]


def summary_of(times, batch: int, threads: bool = False) -> dict:
    """`_summary.json` as ais_bench 0.0.2 writes it: no batch in it, and with threads means and intervals only."""
    mean = float(np.mean(times))
    statistics = {"mean": mean, "count": len(times)}
    if not threads:
        statistics |= {"min": min(times), "max": max(times), "median": float(np.median(times))}
        statistics["percentile(99%)"] = float(np.percentile(times, 99))
    ends = np.cumsum(times)
    return {
        "filesinfo": {}, "args": ["--loop", "5"], "NPU_compute_time": statistics, "H2D_latency": {"mean": 1.0},
        "D2H_latency": {"mean": 9.0}, "pid": 1, "throughput": 1000 * batch / mean,
        "npu_compute_time_list": [[end - time, end] for time, end in zip(times, ends)] if threads else list(times),
    }  # fmt: skip


def line_of(times, batch) -> tuple[str, str]:
    """The two lines that ais_bench prints of one device."""
    summary = summary_of(times, batch)["NPU_compute_time"]
    text = ", ".join(f"{key} = {summary[key]}" for key in ("min", "max", "mean", "median", "percentile(99%)"))
    fps = 1000 * batch / summary["mean"]
    return (
        f"[INFO] NPU_compute_time (ms): {text}",
        f"[INFO] throughput 1000*batchsize.mean({batch})/NPU_compute_time.mean({summary['mean']}): {fps}",
    )


def test_a_summary_gives_ais_bench_s_own_figures_without_a_run(tmp_path, converted):
    path, report = tmp_path / "2026_summary.json", tmp_path / "r.json"
    path.write_text(json.dumps(summary_of(TIMES, 4)))
    onnx_file = converted.parent.parent / "sam3_onnx_300I" / "sam3.onnx"
    printed = benchmark(
        "--ais_bench_summary", path, "--soc_version", "Ascend310P3", "--onnx_path", onnx_file, "--report", report,
        env={"PYTHONPATH": ""},
    )  # fmt: skip
    fps = 4000 / (sum(TIMES) / 5)
    assert markdown(printed.stdout) == [
        ["Ascend310P3", "sam3", "4", f"{fps:.4f}", "model alone, ais_bench, as compiled"]
    ]
    record = json.loads(report.read_text())
    row = record["measurements"][0]
    assert (row["batch"], row["loops"], row["median_ms"], row["fps"]) == (4, 5, 2351.25, pytest.approx(fps, rel=1e-12))
    assert row["p90_ms"] == pytest.approx(percentile(TIMES, 90)) and row["p99_ms"] == pytest.approx(
        percentile(TIMES, 99)
    )
    assert record["ais_bench_summary"] == {path.name: sha256(path)} and record["host_memory_mib"] is None
    # With the model named, its manifest says chip, precision and graph.
    again = benchmark("--ais_bench_summary", path, "--model_path", converted)
    assert markdown(again.stdout)[0][0] == "Ascend310P3" and "precision_mode_v2=fp16" in again.stdout


@pytest.mark.parametrize(
    "change",
    (
        {"npu_compute_time_list": []}, {"throughput": "fast"}, {"NPU_compute_time": [1, 2]},
        {"NPU_compute_time": {"mean": 2.0, "median": "short"}},
    ),
)  # fmt: skip
def test_a_summary_with_something_else_in_it_is_refused_in_one_line(tmp_path, change):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary_of(TIMES, 4) | change))
    with pytest.raises(UsageError, match="not a usable summary of ais_bench"):
        speed.read_ais_bench(path)


def test_what_ais_bench_printed_is_read_through_its_progress_bars(tmp_path):
    log = tmp_path / "log.txt"
    compute, throughput = line_of(TIMES, 4)
    bar = "Inference array Processing: 100%|####| 1/1 [00:11<00:00, 11.8s/it]"
    log.write_text(
        f"[INFO] warm up 1 done\nloop inference exec: (5/5)\r{bar}\r{compute}\r\n{throughput}\n[INFO] ------\n",
        newline="",
    )
    [row] = speed.read_ais_bench(log)
    assert (row["batch"], row["median_ms"], row["p90_ms"], row["loops"]) == (4, 2351.25, None, None)
    assert row["fps"] == pytest.approx(4000 / np.mean(TIMES)) and row["p99_ms"] == pytest.approx(percentile(TIMES, 99))


def test_several_devices_are_rows_of_their_own_and_their_sum_is_none(tmp_path):
    log, slower = tmp_path / "log.txt", [time * 1.5 for time in TIMES]
    (first, first_fps), (second, second_fps) = line_of(TIMES, 4), line_of(slower, 4)
    fps = [line.rsplit(": ", 1)[1] for line in (first_fps, second_fps)]
    # The devices' processes print between each other's lines.
    lines = [first, second, second_fps, first_fps, "[INFO] multidevice run end qsize:4 result:0"]
    lines += [f"[INFO] i:{i} device_{i + 2} throughput:{fps[i]} start_time:1.0 end_time:2.0" for i in (0, 1)]
    lines += [f"[INFO] summary throughput:{sum(map(float, fps))}"]
    log.write_text("\n".join(lines))
    rows = {row["name"]: row for row in speed.read_ais_bench(log)}
    assert set(rows) == {"ais_bench, device 2", "ais_bench, device 3"}
    assert rows["ais_bench, device 2"]["median_ms"] == 2351.25
    assert rows["ais_bench, device 3"]["median_ms"] == pytest.approx(1.5 * 2351.25)
    assert [rows[name]["fps"] for name in sorted(rows)] == pytest.approx(list(map(float, fps)))


def test_a_run_with_threads_gives_means_only(tmp_path):
    path, log = tmp_path / "threads_summary.json", tmp_path / "threads.txt"
    path.write_text(json.dumps(summary_of(TIMES, 2, threads=True)))
    throughput = line_of(TIMES, 2)[1]
    log.write_text(f"[INFO] NPU_compute_time (ms): mean = {np.mean(TIMES)}\n{throughput}\n")
    for row in (*speed.read_ais_bench(path), *speed.read_ais_bench(log)):
        assert row["fps"] == pytest.approx(2000 / np.mean(TIMES)) and row["batch"] == 2
        assert [row[key] for key in ("median_ms", "p90_ms", "p99_ms")] == [None] * 3
    printed = benchmark("--ais_bench_summary", path)
    assert re.search(r"^ais_bench +2 +5 +- +- +- +\d", printed.stdout, re.MULTILINE)


UNUSABLE = {
    "an empty file": "",
    "another log": "[INFO] load model x.om success\n[ERROR] acl execute failed:507018\n",
    "other JSON": json.dumps({"throughput": 3.5}),
    "broken JSON": json.dumps(summary_of(TIMES, 4))[:200],
    "a run that came to nothing": json.dumps(summary_of(TIMES, 4) | {"throughput": 0}),
    "a partial last batch": json.dumps(summary_of(TIMES, 4) | {"throughput": 3.5e3 / float(np.mean(TIMES))}),
    "a line without its statistics": line_of(TIMES, 4)[1],
}


@pytest.mark.parametrize("text", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_summary_is_refused_with_its_name(text, tmp_path):
    path = tmp_path / "given_summary.json"
    path.write_text(text)
    assert "given_summary.json" in error_line(run_script("sam3_benchmark.py", "--ais_bench_summary", path))
