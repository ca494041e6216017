#!/usr/bin/env bash
# Trace a job with one and two micro-batches, alternating, and compare each pair, for docs/profiling.md.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/accumulation.sh results/a-name-for-this-machine
# PYTHON sets the interpreter; BACKEND and DEVICE replace gloo on the CPU. Takes about two minutes on an idle machine.
# Replaces existing runs.
set -euo pipefail
out=${1:?the folder for the results}
python=${PYTHON:-python3}
backend=${BACKEND:-gloo}
name=accumulate
[ "$backend" = gloo ] || name=accumulate-$backend
new=$(mktemp -d "$out/new.XXXXXX")
trap 'rm -rf "$new"' EXIT

for pair in a b c; do
  for micro_batches in 1 2; do
    "$python" -m paceline profile trace --model mlp --hidden 2048 --batch-size 32 --ranks 2 --steps 20 \
      --backend "$backend" --device "${DEVICE:-cpu}" --accumulate "$micro_batches" --out "$new"
    rm -rf "$out/$name-$micro_batches-$pair"
    rm "$new"/2*/trace.json.gz # large, and the tables have what is cited
    mv "$new"/2* "$out/$name-$micro_batches-$pair"
  done
done
for pair in a b c; do
  "$python" -m paceline profile --compare "$out/$name-1-$pair" "$out/$name-2-$pair" | grep 'communication is s'
done
