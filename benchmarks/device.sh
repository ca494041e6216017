#!/usr/bin/env bash
# The reference measurements of a machine with a GPU and many cores: everything that results/ cites from it.
#   benchmarks/device.sh FOLDER      (needs paceline importable; PYTHON names the interpreter)
set -euo pipefail
out=${1:?the folder for the results}
python=${PYTHON:-python3}
mkdir -p "$out"
bench() { # NAME ARGUMENTS...: one run, its folder renamed to NAME
  local name=$1
  shift
  "$python" -m paceline bench "$@" --out "$out"
  mv "$out"/2*-bench-* "$out/$name"
}
bench nccl-1-rank allreduce --backend nccl --ranks 1 --sizes 4KiB,64KiB,1MiB,16MiB,100MiB,1GiB
bench gloo-cuda allreduce --backend gloo --device cuda --ranks 2,4 --sizes 4KiB,1MiB,25MiB,100MiB
bench gloo-cpu allreduce --backend gloo --ranks 2,4,8,16 --sizes 4KiB,64KiB,1MiB,10MiB,25MiB,100MiB
bench chunks-gloo-cpu chunks --ranks 2,4
"$python" benchmarks/engine_against_loop.py --ranks 2 | tee "$out/engine_against_loop.txt"
