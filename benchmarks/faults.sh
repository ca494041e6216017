#!/usr/bin/env bash
# Measure the tables of docs/faults.md on this machine. Needs root; all tables take hours.
#   benchmarks/faults.sh FOLDER [named detection noise recovery sequences goodput saves trust malformed]
#   benchmarks/faults.sh FOLDER nccl    # 2 and 4 NCCL ranks that share a GPU: about 5 minutes, not part of the others
# PYTHON sets the interpreter. A second call resumes interrupted runs and keeps finished ones.
# TRIALS and SPAN (seconds per run) shorten a test of this script: TRIALS=1 SPAN=20 benchmarks/faults.sh tried noise
set -uo pipefail
out=${1:?the folder for the results}
shift
python=${PYTHON:-python3}
status=0
jobs=()
mkdir -p "$out"
trap '[ ${#jobs[@]} = 0 ] || kill "${jobs[@]}" && wait; exit 130' INT TERM

choose() { # NAME ARGUMENTS...: the command of one run of `paceline faults` in the folder NAME
  local name=$1 folder
  shift
  mkdir -p "$out/$name"
  folder=$(find "$out/$name" -mindepth 1 -maxdepth 1 -name '*-faults' | sort | tail -n 1)
  command=("$python" -m paceline faults)
  if [ -n "$folder" ]; then command+=(--resume "$folder"); else command+=("$@" --out "$out/$name"); fi
}

faults() {
  choose "$@"
  "${command[@]}"
}

nccl() { # RANKS: faults of NCCL ranks on one GPU, then recoveries; without MPS, which a killed client may take down
  local common=(--systems "${SYSTEMS:-train}" --backend nccl --device cuda --ranks "$1") failed=0
  export PACELINE_SHARE_GPUS=1
  faults "nccl-$1" --faults kill,stop,exception,endless-kernel,extra-collective "${common[@]}" \
    --trials "${TRIALS:-2}" || failed=1
  faults "nccl-$1-recovery" --faults kill --on-fault restart,spare,shrink "${common[@]}" \
    --trials "${RECOVERIES:-1}" || failed=1
  return "$failed"
}

wait_all() { # for the jobs
  local failed=0 job
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  jobs=()
  return "$failed"
}

tests() { # NAME ARGUMENTS...: tests, one after the other; each with its result in NAME.txt
  local name=$1
  shift
  "$python" -m pytest -v --durations 3 "$@" 2>&1 | tee "$out/$name.txt"
}

row() {
  case $1 in
    named) # every fault in every system
      faults named --faults all --systems train,script,torch --trials "${TRIALS:-2}" ;;
    detection)
      faults detection --faults kill,stop,gil,loop,link-down --systems train,script --trials "${TRIALS:-20}" ;;
    noise) # four healthy jobs at once, each for half an hour: two hours of noise on a loaded machine
      local job
      for job in train-gloo train-shm script-gloo script-shm; do
        choose "noise-$job" --faults noise --systems "${job%-*}" --backend "${job#*-}" --patience "${SPAN:-300}" \
          --trials "${TRIALS:-6}"
        "${command[@]}" &
        jobs+=($!)
      done
      wait_all ;;
    nccl) # both sizes at once
      local ranks
      for ranks in 2 4; do
        nccl "$ranks" &
        jobs+=($!)
      done
      wait_all ;;
    recovery) # of 100 MB of state
      faults recovery --faults kill --systems train --on-fault restart,spare,shrink --state 100MB \
        --trials "${TRIALS:-20}" ;;
    sequences) # random faults with shrink and grow: every sample once; the weights after restart and spare
      tests sequences tests/dist/test_recovery.py ;;
    goodput) # useful time with a fault every 120 s, and three rates that are predicted
      for policy in restart spare; do
        "$python" benchmarks/goodput.py --on-fault "$policy" --mtbf 120,60,30 --seconds "${SPAN:-90}" \
          --rounds "${TRIALS:-6}" --out "$out/goodput-$policy.json" | tee "$out/goodput-$policy.md" || return 1
      done ;;
    saves) # 200 kills during a save, and 1,000 checkpoints with flipped bytes
      faults saves --faults kill-in-save --systems train --trials "${TRIALS:-100}" &&
        tests flipped tests/cli/test_malformed.py -k damaged_checkpoints ;;
    trust) # another user, 50 times on each backend
      tests trust tests/dist/test_trust.py ;;
    malformed)
      tests malformed tests/cli/test_malformed.py ;;
    *)
      echo "$1: unknown row; use named, detection, noise, recovery, sequences, goodput, saves, trust, malformed, nccl" >&2
      return 2 ;;
  esac
}

[ $# -gt 0 ] || set -- named detection noise recovery sequences goodput saves trust malformed
for name in "$@"; do
  row "$name" || { echo "$name: failed" >&2; status=1; }
done
exit "$status"
