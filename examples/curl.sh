#!/usr/bin/env bash
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# The service with curl: bash examples/curl.sh street.jpg "red car" 210 95 [http://127.0.0.1:8000]
set -euo pipefail
picture=$1 phrase=$2 x=$3 y=$4 server=${5:-http://127.0.0.1:8000}
json=(-sS --fail-with-body -H "Content-Type: application/json")

id=$(curl -sS --fail-with-body -F "file=@$picture" "$server/v1/images" | grep -o '[0-9a-f]\{64\}')
echo "image_id $id"
curl "${json[@]}" -d "{\"image_id\": \"$id\", \"prompts\": [\"$phrase\"]}" "$server/v1/segment/text"
echo
curl "${json[@]}" -d "{\"image_id\": \"$id\", \"points\": [{\"x\": $x, \"y\": $y}]}" "$server/v1/segment/points"
echo
# All in one call, the best mask as a PNG in base64:
curl -sS --fail-with-body -F "file=@$picture" -F "x=$x" -F "y=$y" "$server/segment"
echo
curl -sS --fail-with-body "$server/v1/images/$id/coco.json"
echo
