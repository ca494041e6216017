"""Kubernetes manifests: an indexed Job with its Service, a JobSet, or a Kubeflow TrainJob. Nothing is submitted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from paceline.errors import refuse

_INDENTS = {"job": 8, "jobset": 14, "trainjob": 4}  # spaces before each variable, by kind
KINDS = tuple(_INDENTS)
_MOST_LETTERS = {"jobset": 44}  # a JobSet appends more characters to the names of its pods
GRACE_S = 60.0  # time for the ranks to save
_LEAVE_S = 5  # time for torchrun to exit after its ranks


def _dump(value: Any) -> str:
    """A value as JSON, which is also YAML."""
    return json.dumps(value, ensure_ascii=False)


def render_manifest(
    command: Sequence[str], *, name: str, image: str, nodes: int = 1, ranks_per_node: int = 1, gpus_per_node: int = 0,
    variables: Mapping[str, str] | None = None, volume: str = "", folder: str = "", grace_s: float = GRACE_S,
    kind: str = "job",
) -> str:  # fmt: skip
    """The manifest as YAML for `kubectl apply -f -`.

    `volume` is CLAIM:PATH, a PersistentVolumeClaim and its mount point.
    """
    is_name = re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", name)
    is_volume = re.fullmatch(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^:]*)?", volume)
    unused = kind == "trainjob" and (volume or folder or grace_s != GRACE_S)
    variables = variables or {}
    refuse(
        (kind not in KINDS, f"--kind {kind} is unknown: use {', '.join(KINDS)}"),
        (not image, "--kubernetes needs --image: a container image with torch, Paceline and your program"),
        (not is_name, f"--name {name}: use up to 53 lower-case letters, digits and -, starting with a letter"),
        (len(name) > _MOST_LETTERS.get(kind, 53), f"--name {name}: use at most 44 letters with --kind jobset"),
        (any(key.startswith("PET_") for key in variables), "--env PET_...: torchrun reads these; leave them out"),
        (not is_volume, f"--volume {volume}: write CLAIM:/PATH, a PersistentVolumeClaim and its mount point"),
        (unused, "--volume, --folder and --grace with --kind trainjob: set them in its training runtime instead"),
    )
    own = {"PACELINE_RUN": name, "PYTHONUNBUFFERED": "1"}
    if kind != "trainjob":
        own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(grace_s))
    env: list[Any] = [{"name": key, "value": value} for key, value in (own | dict(variables)).items()]
    if "PACELINE_SECRET" not in variables:
        # If the user has created this Secret, ranks authenticate each other with it.
        secret = {"name": f"{name}-secret", "key": "secret", "optional": True}
        env.append({"name": "PACELINE_SECRET", "valueFrom": {"secretKeyRef": secret}})
    mounts: list[Any] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Any] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if volume:
        claim, _, path = volume.partition(":")
        mounts.append({"name": "data", "mountPath": path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    gpus = {"nvidia.com/gpu": gpus_per_node}
    indent = "\n" + " " * _INDENTS[kind]
    # Kubernetes expands $(NAME) in commands and variables, unless the $ is doubled.
    text = Template(Path(__file__).with_name(f"kubernetes-{kind}.yaml").read_text()).substitute(
        name=name,
        nodes=nodes,
        ranks=ranks_per_node,
        leave_s=round(grace_s) + _LEAVE_S,
        image=_dump(image),
        words=_dump(list(command))[1:-1].replace("$", "$$"),
        folder=_dump(folder),
        resources=_dump({"limits": gpus, "requests": gpus} if gpus_per_node else {}),
        env=indent.join(f"- {_dump(item)}" for item in env).replace("$", "$$"),
        mounts=_dump(mounts),
        volumes=_dump(volumes),
    )
    return re.sub(r'\n *\w+: ({}|"")(?=\n)', "", text)  # remove empty fields
