"""Write tables for `paceline predict --csv` from a run of `paceline tune`, and predict from them.

    python examples/tables_for_predict.py results/neoverse-n1-2-cores/tune-1Gb-link-torch examples/bucket-tables
    paceline predict --csv examples/bucket-tables --measured examples/bucket-tables/steps.csv

`layer-sizes.csv` and `layer-times.csv` have one row per tensor, in model order, `allreduce-times.csv` one per message
size, and `steps.csv` one per measured bucket size. Any program can write such tables.
"""

import csv
import statistics
import sys
from pathlib import Path

import paceline


def describe(name: str, seconds: list[float]) -> list:
    spread = statistics.stdev(seconds), statistics.median(seconds)
    return [name, *(f"{value:.9f}" for value in (min(seconds), max(seconds), statistics.fmean(seconds), *spread))]


def write(path: Path, header: str, rows: list[list]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header.split(","), *rows])


def main(run: str, folder: Path) -> None:
    tuned = paceline.load_result(run)
    (profile,) = (record for record in tuned.records if record.kind == "layer_profile")
    sweep = [record for record in tuned.records if record.kind == "collective" and record.world_size > 1]

    # A gradient's own time starts when the previous gradient is ready.
    times, previous = {}, (0.0,) * len(profile.parameters[0].ready_s)
    for parameter in profile.parameters:
        latest = tuple(map(max, parameter.ready_s, previous))
        times[parameter.name] = [after - before for after, before in zip(latest, previous, strict=True)]
        previous = latest
    model = [gradient["name"] for gradient in tuned.config["gradients"]]
    sizes = {parameter.name: parameter.num_elements for parameter in profile.parameters}

    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "layer-sizes.csv", ",Name,No. Params", [[i, name, sizes[name]] for i, name in enumerate(model)])
    rows = [describe(f"{name} grad", times[name]) for name in model]
    phases = {"forward": profile.forward, "step": profile.optimizer}
    rows += [describe(name, [seconds for (seconds,) in timed.seconds]) for name, timed in phases.items()]
    write(folder / "layer-times.csv", "Name,min,max,mean,std,median", rows)
    rows = [
        [r.backend, r.world_size, r.num_elements, r.num_bytes, f"{r.timing.mean_s:.9f}", f"{r.timing.stdev_s:.9f}"]
        for r in sweep
    ]
    header = "backend,world_size,total_elements,total_bytes,average_time,stdev_time"
    write(folder / "allreduce-times.csv", header, rows)
    grid = tuned.table("grid").rows_json()
    rows = [[f"{row['cap_bytes']}B", f"{row['measured_s']:.9f}"] for row in grid if row["measured_s"] is not None]
    write(folder / "steps.csv", "bucket_size,step_s", rows)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print(paceline.predict_csv(sys.argv[2], measured=Path(sys.argv[2]) / "steps.csv"))
