"""Load a saved run and derive your own numbers from its raw samples.

paceline bench allreduce --sizes 1MiB,4MiB --out runs
python examples/read_a_run.py runs/TIME-bench-allreduce
"""

import sys

import paceline

result = paceline.load_result(sys.argv[1])
run = result.run
print(f"{run.verb} on {run.environment.cores} cores, torch {run.environment.versions['torch']}")
for record in run.records:
    times = record.timing
    print(
        f"{record.num_bytes} bytes: {times.count} repetitions, median {times.median_s:.6f} s, noise {times.noise:.0%}"
    )
for record, line in result.fits:
    print(f"{record.backend}, {record.world_size} ranks: a 2 MiB message takes about {line.estimate_s(2**21):.6f} s")
