#!/usr/bin/env bash
# Pairs of traces with one and two micro-batches, in turns, that docs/profiling.md cites; then each pair compared.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/accumulation.sh results/a-name-for-this-machine
# PYTHON names the interpreter. Takes about two minutes on a machine that is otherwise quiet. What is there is replaced.
set -euo pipefail
out=${1:?the folder for the results}
python=${PYTHON:-python3}
new=$(mktemp -d "$out/new.XXXXXX")
trap 'rm -rf "$new"' EXIT

for pair in a b c; do
  for micro_batches in 1 2; do
    "$python" -m paceline profile trace --model mlp --hidden 2048 --batch-size 32 --ranks 2 --backend gloo --steps 20 \
      --accumulate "$micro_batches" --out "$new"
    rm -rf "$out/accumulate-$micro_batches-$pair"
    rm "$new"/2*/trace.json.gz # large, and the tables have what is cited
    mv "$new"/2* "$out/accumulate-$micro_batches-$pair"
  done
done
for pair in a b c; do
  "$python" -m paceline profile --compare "$out/accumulate-1-$pair" "$out/accumulate-2-$pair" | grep 'messages are'
done
