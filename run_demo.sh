#!/usr/bin/env bash
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# The whole chain on the tiny checkpoint, without weights or hardware: environment, demo pictures, ONNX export with its
# check against PyTorch, the two compared on pictures, Mean IoU (COCO's layout) and cgF1 (SA-Co's layout, two workers)
# through PyTorch and through ONNX Runtime, speed. Results go to demo_output/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/sam3_utils/environment.sh"
use_environment "$root" requirements.txt requirements-serve.txt
tiny="$root/assets/tiny_sam3"
out="$root/demo_output"

step() { printf '\n== %s\n' "$1"; }

step "demo pictures"
"$VENV_PYTHON" "$tiny/make_demo_data.py" --output_dir "$out/coco2017"
"$VENV_PYTHON" "$tiny/make_demo_saco.py" --output_dir "$out/dataset"
step "export to ONNX"
"$VENV_PYTHON" "$root/sam3_export_onnx.py" --target_device 300I --model_path "$tiny" --output_dir "$out/sam3_onnx_300I"
step "ONNX compared with PyTorch on pictures"
"$VENV_PYTHON" "$root/sam3_compare.py" --reference "$tiny" --candidate "$out/sam3_onnx_300I/sam3.onnx" --batch_size 4 \
    --images "$out"/coco2017/val2017/*0[1-4].jpg --phrases star circle "large blue square" --report "$out/compare.json"
for model in "$tiny" "$out/sam3_onnx_300I/sam3.onnx"; do
    runtime=torch
    [ -d "$model" ] || runtime=onnx
    step "Mean IoU, cgF1 and speed: $runtime"
    "$VENV_PYTHON" "$root/sam3_coco_iou_eval.py" --model_path "$model" --processor_path "$tiny" \
        --coco_root "$out/coco2017" --batch_size 8 --output_dir "$out/coco_iou_$runtime" --overlays 4 --overwrite
    "$VENV_PYTHON" "$root/sam3_image_infer.py" --model_path "$model" --processor_path "$tiny" \
        --dataset_root "$out/dataset" --device cpu,cpu --batch_size 8 \
        --output_dir "$out/gold_predictions_$runtime" --overwrite
    "$VENV_PYTHON" "$root/batch_eval.py" --gt_base "$out/dataset/gt-annotations" \
        --pred_dir "$out/gold_predictions_$runtime" --report "$out/cgf1_$runtime.json" --plot "$out/cgf1_plots_$runtime"
    "$VENV_PYTHON" "$root/sam3_benchmark.py" --model_path "$model" --report "$out/benchmark_$runtime.json"
done
step "results"
"$VENV_PYTHON" - "$out" <<'PY'
import json, sys
out, far = sys.argv[1], False
for name, path, read in (
    ("Mean IoU", "coco_iou_{}/summary.json", lambda content: content["value"]),
    ("cgF1", "cgf1_{}.json", lambda content: content["mean"]["cgF1_eval_segm_cgF1"]),
):
    torch, onnx = (read(json.load(open(f"{out}/{path.format(runtime)}"))) for runtime in ("torch", "onnx"))
    print(f"{name} (torch): {torch:.6f}\n{name} (onnx): {onnx:.6f}")
    far |= abs(torch - onnx) > 1e-4
print(f"look at {out}/coco_iou_onnx/overlays and {out}/cgf1_plots_onnx")
sys.exit("error: PyTorch and ONNX differ by more than 1e-4" if far else 0)
PY
