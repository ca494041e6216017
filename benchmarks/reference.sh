#!/usr/bin/env bash
# Measure this machine's reference runs under results/, which the docs cite.
#   PACELINE_HOST=a-name-for-this-machine benchmarks/reference.sh results/a-name-for-this-machine
# PYTHON sets the interpreter. Takes about half an hour on an idle machine.
set -euo pipefail
out=${1:?the folder for the results}
python=${PYTHON:-python3}
mkdir -p "$out"

bench() { # NAME ARGUMENTS...: one run, its folder renamed to NAME; what is there already is kept
  local name=$1
  shift
  if [ -e "$out/$name" ]; then
    echo "$out/$name exists already: skipped"
    return
  fi
  "$python" -m paceline bench "$@" --out "$out"
  mv "$out"/2*-bench-* "$out/$name"
}

ranks=2,4,6
[ "$(nproc)" -ge 16 ] && ranks=2,4,6,8,16
"$python" benchmarks/engine_against_loop.py | tee "$out/engine_against_loop.txt"
if [ "$(nproc)" -ge 16 ]; then # why the engine uses one thread
  "$python" benchmarks/engine_against_loop.py --threads 8 | tee "$out/engine_against_loop_8_threads.txt"
fi
both=gloo,paceline
bench allreduce-latency allreduce --backend "$both" --memory ordinary,shared --limit --ranks "$ranks" -b 4KiB -e 256KiB -f 4
bench allreduce allreduce --backend "$both" --memory ordinary,shared --limit --ranks "$ranks" \
  --sizes 1MiB,4MiB,10MiB,25MiB,100MiB
# A single number of ranks, with all sizes.
bench allreduce-2-ranks allreduce --backend "$both" --memory ordinary,shared --limit --ranks 2 -b 4KiB -e 64MiB -f 4
bench allreduce-bfloat16 allreduce --backend "$both" --memory ordinary,shared --limit --ranks 2,4 --dtype bfloat16 \
  --sizes 1MiB,10MiB,100MiB
bench allreduce-gloo allreduce --backend gloo --ranks "$ranks" --sizes 1MiB,10MiB,100MiB,1GiB
bench chunks-gloo chunks --ranks 2,4
bench wrappers-2-ranks wrappers --backend "$both" --ranks 2 --wrapper bare,torch,torch-tuned,paceline --iters 24
bench wrappers-gloo-2-ranks wrappers --ranks 2 --iters 24
bench wrappers-gloo-1-rank wrappers --ranks 1 --model resnet18,tiny --wrapper bare,torch,torch-tuned,paceline --iters 30
if "$python" -c 'import sys; from paceline.machine import count_gpus; sys.exit(count_gpus() == 0)'; then
  bench allreduce-nccl-1-rank allreduce --backend nccl --ranks 1 --sizes 4KiB,64KiB,1MiB,16MiB,100MiB,1GiB
  bench wrappers-nccl-1-rank wrappers --backend nccl --ranks 1 --model gpt2-large --dtype bfloat16 \
    --wrapper bare,torch,torch-tuned,paceline --iters 120
  bench wrappers-gloo-cuda-2-ranks wrappers --backend gloo --device cuda --ranks 2 --model cnn,resnet18 \
    --wrapper bare,torch,torch-tuned,paceline --iters 30
  bench allreduce-gloo-cuda allreduce --backend gloo --device cuda --ranks 2,4 --sizes 4KiB,1MiB,25MiB,100MiB
fi
