"""Manifests for Kubernetes: a plain indexed Job with its Service, or Kubeflow's TrainJob. Nothing is submitted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import refuse

KINDS = ("job", "trainjob")
_PORT = 29400  # inside the pods, where nobody else is
_RETRIES = 10
GRACE_S, _LEAVE_S = 60.0, 5  # for the ranks to save, and for torchrun to end after them
# By `exec`, torchrun gets the signal that ends a pod, and passes it on to the ranks. Pods find each other by the
# Service; a pod of an indexed Job is called after its index.
_START = (
    "exec torchrun --nnodes {nodes} --node-rank $JOB_COMPLETION_INDEX --nproc-per-node {ranks} "
    '--master-addr {name}-0.{name} --master-port {port} --no-python "$@"'
)


def build_manifest(
    command: Sequence[str], *, name: str, image: str, nodes: int = 1, ranks_per_node: int = 1, gpus_per_node: int = 0,
    variables: Mapping[str, str] | None = None, volume: str = "", folder: str = "", grace_s: float = GRACE_S,
    kind: str = "job",
) -> list[dict[str, Any]]:  # fmt: skip
    """The objects of the manifest, as `kubectl` takes them.

    `volume` is CLAIM:PATH, a PersistentVolumeClaim and where it is mounted.
    """
    refuse(
        (kind not in KINDS, f"--kind {kind} is unknown: use {' or '.join(KINDS)}"),
        (not image, "--kubernetes needs --image: the container image with torch, Paceline and your program"),
        (not re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", name),
         f"--name {name}: pods need a name of lower-case letters, digits and -, that begins with a letter"),
        (any(key.startswith("PET_") for key in variables or {}), "--env PET_...: torchrun reads these; leave them out"),
        (volume and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^:]*", volume),
         f"--volume {volume}: write CLAIM:/PATH, a PersistentVolumeClaim and where to mount it"),
        (kind == "trainjob" and (volume or folder or grace_s != GRACE_S),
         "--volume, --folder and --grace with --kind trainjob: they belong to its training runtime; leave them out"),
    )  # fmt: skip
    own = {"PACELINE_RUN": name, "PYTHONUNBUFFERED": "1"}
    if kind == "job":
        own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(grace_s))
    command = [word.replace("$", "$$") for word in command]  # Kubernetes replaces $(NAME)
    env: list[dict[str, Any]] = [
        {"name": key, "value": value.replace("$", "$$")} for key, value in {**own, **(variables or {})}.items()
    ]
    if "PACELINE_SECRET" not in (variables or {}):
        # What ranks prove to know when they meet, if the user has made a Secret of this name.
        source = {"secretKeyRef": {"name": f"{name}-secret", "key": "secret", "optional": True}}
        env.append({"name": "PACELINE_SECRET", "valueFrom": source})
    gpus = {"nvidia.com/gpu": gpus_per_node}
    resources = {"limits": gpus, "requests": gpus} if gpus_per_node else {}
    if kind == "trainjob":
        trainer = {
            "image": image, "command": ["torchrun", "--no-python", *command], "env": env, "numNodes": nodes,
            "numProcPerNode": ranks_per_node,
        } | ({"resourcesPerNode": resources} if resources else {})  # fmt: skip
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
        head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
        return [{**head, "metadata": {"name": name}, "spec": spec}]
    start = _START.format(nodes=nodes, ranks=ranks_per_node, name=name, port=_PORT)
    mounts, volumes = [{"name": "shm", "mountPath": "/dev/shm"}], [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if volume:
        claim, _, path = volume.partition(":")
        mounts.append({"name": "data", "mountPath": path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    container: dict[str, Any] = {
        "name": "ranks", "image": image, "command": ["sh", "-c", start, "paceline", *command], "env": env,
        "volumeMounts": mounts,
    }  # fmt: skip
    container |= ({"workingDir": folder} if folder else {}) | ({"resources": resources} if resources else {})
    pod = {
        "subdomain": name, "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": round(grace_s) + _LEAVE_S,
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    spec = {
        "completions": nodes, "parallelism": nodes, "completionMode": "Indexed", "backoffLimit": _RETRIES,
        "template": {"spec": pod},
    }  # fmt: skip
    service = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": _PORT}],
    }  # fmt: skip
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec},
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
            lines.append(f"{head} {json.dumps(item, ensure_ascii=False)}")
    return lines


def render_manifest(command: Sequence[str], **arguments: Any) -> str:
    """The manifest as YAML, for `kubectl apply -f -`; the arguments are those of `build_manifest`."""
    return "---\n".join("\n".join(_render(item, "")) + "\n" for item in build_manifest(command, **arguments))
