"""Manifests for Kubernetes: a plain indexed Job with its Service, or Kubeflow's TrainJob. Nothing is submitted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import refuse

KINDS = ("job", "trainjob")
_PORT = 29400  # inside the pods, where nobody else is
_RETRIES = 10
# By `exec`, torchrun gets the signal that ends a pod, and passes it on to the ranks. Pods find each other by the
# Service; a pod of an indexed Job is called after its index.
_START = (
    "exec torchrun --nnodes {nodes} --node-rank $JOB_COMPLETION_INDEX --nproc-per-node {ranks} "
    '--master-addr {name}-0.{name} --master-port {port} --no-python "$@"'
)


@dataclass(frozen=True)
class ClusterJob:
    """What the pods are to run. `volume` is CLAIM:PATH, a PersistentVolumeClaim and where it is mounted."""

    command: Sequence[str]
    name: str
    nodes: int
    ranks_per_node: int
    image: str
    gpus_per_node: int
    variables: Mapping[str, str]
    volume: str
    folder: str
    grace_s: float


def _check(job: ClusterJob, kind: str) -> None:
    refuse(
        (kind not in KINDS, f"--kind {kind} is unknown: use {' or '.join(KINDS)}"),
        (not job.image, "--kubernetes needs --image: the container image with torch, Paceline and your program"),
        (not re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", job.name),
         f"--name {job.name}: pods need a name of lower-case letters, digits and -, that begins with a letter"),
        (job.volume and not re.fullmatch(r"[a-z0-9.-]+:/.*", job.volume),
         f"--volume {job.volume}: write CLAIM:/PATH, a PersistentVolumeClaim and where to mount it"),
        (kind == "trainjob" and (job.volume or job.folder),
         "--volume and --folder with --kind trainjob: they belong to its training runtime; leave them out"),
    )  # fmt: skip


def build_manifest(job: ClusterJob, kind: str) -> list[dict[str, Any]]:
    """The objects of the manifest, as `kubectl` takes them."""
    _check(job, kind)
    own = {"PACELINE_RUN": job.name, "PYTHONUNBUFFERED": "1", **job.variables}
    env = [{"name": name, "value": value} for name, value in own.items()]
    resources = {"limits": {"nvidia.com/gpu": job.gpus_per_node}} if job.gpus_per_node else {}
    if kind == "trainjob":
        trainer = {
            "image": job.image, "command": ["torchrun", "--no-python", *job.command], "env": env,
            "numNodes": job.nodes, "numProcPerNode": job.ranks_per_node,
        } | ({"resourcesPerNode": resources} if resources else {})  # fmt: skip
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
        head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
        return [{**head, "metadata": {"name": job.name}, "spec": spec}]
    start = _START.format(nodes=job.nodes, ranks=job.ranks_per_node, name=job.name, port=_PORT)
    mounts, volumes = [{"name": "shm", "mountPath": "/dev/shm"}], [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.volume:
        claim, _, path = job.volume.partition(":")
        mounts.append({"name": "data", "mountPath": path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    container: dict[str, Any] = {
        "name": "ranks", "image": job.image, "command": ["sh", "-c", start, "paceline", *job.command], "env": env,
        "volumeMounts": mounts,
    }  # fmt: skip
    container |= ({"workingDir": job.folder} if job.folder else {}) | ({"resources": resources} if resources else {})
    pod = {
        "subdomain": job.name, "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": round(job.grace_s),
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    spec = {
        "completions": job.nodes, "parallelism": job.nodes, "completionMode": "Indexed", "backoffLimit": _RETRIES,
        "template": {"spec": pod},
    }  # fmt: skip
    service = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": job.name},
        "ports": [{"name": "rendezvous", "port": _PORT}],
    }  # fmt: skip
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": job.name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec},
    ]


def _render(value: Any, indent: str) -> list[str]:
    """YAML in blocks; scalars and empty values as JSON, which is YAML."""
    lines: list[str] = []
    for key, item in value.items() if isinstance(value, dict) else [("-", item) for item in value]:
        head = f"{indent}-" if key == "-" else f"{indent}{key}:"
        if isinstance(item, dict | list) and item:
            inner = _render(item, indent + "  ")
            if key == "-":  # the first line of a block stands behind the dash
                lines += [f"{head} {inner[0].lstrip()}", *inner[1:]]
            else:
                lines += [head, *inner]
        else:
            lines.append(f"{head} {json.dumps(item)}")
    return lines


def render_manifest(job: ClusterJob, kind: str) -> str:
    """The manifest as YAML, for `kubectl apply -f -`."""
    return "---\n".join("\n".join(_render(item, "")) + "\n" for item in build_manifest(job, kind))
