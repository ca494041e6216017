"""The fields and types of the Kubernetes objects that Paceline's manifests use, from the API reference.

A type is a Python type, the name of an object below, or a list of either; "map" maps strings to strings, and
"quantities" maps them to amounts. `REQUIRED` lists the mandatory fields.
"""

from __future__ import annotations

from typing import Any

OBJECTS: dict[str, dict[str, Any]] = {
    "Job": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "JobSpec"},
    "Service": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "ServiceSpec"},
    "TrainJob": {"apiVersion": str, "kind": str, "metadata": "ObjectMeta", "spec": "TrainJobSpec"},
    "ObjectMeta": {"name": str, "namespace": str, "labels": "map", "annotations": "map"},
    "JobSpec": {
        "parallelism": int,
        "completions": int,
        "completionMode": str,
        "backoffLimit": int,
        "backoffLimitPerIndex": int,
        "maxFailedIndexes": int,
        "activeDeadlineSeconds": int,
        "ttlSecondsAfterFinished": int,
        "suspend": bool,
        "podReplacementPolicy": str,
        "template": "PodTemplateSpec",
    },
    "PodTemplateSpec": {"metadata": "ObjectMeta", "spec": "PodSpec"},
    "PodSpec": {
        "containers": ["Container"],
        "initContainers": ["Container"],
        "volumes": ["Volume"],
        "restartPolicy": str,
        "terminationGracePeriodSeconds": int,
        "hostname": str,
        "subdomain": str,
        "nodeSelector": "map",
        "serviceAccountName": str,
        "hostNetwork": bool,
        "setHostnameAsFQDN": bool,
    },
    "Container": {
        "name": str,
        "image": str,
        "command": [str],
        "args": [str],
        "workingDir": str,
        "env": ["EnvVar"],
        "resources": "ResourceRequirements",
        "volumeMounts": ["VolumeMount"],
        "imagePullPolicy": str,
    },
    "EnvVar": {"name": str, "value": str, "valueFrom": "EnvVarSource"},
    "EnvVarSource": {"secretKeyRef": "SecretKeySelector"},
    "SecretKeySelector": {"name": str, "key": str, "optional": bool},
    "ResourceRequirements": {"limits": "quantities", "requests": "quantities"},
    "VolumeMount": {"name": str, "mountPath": str, "readOnly": bool, "subPath": str},
    "Volume": {"name": str, "emptyDir": "EmptyDir", "persistentVolumeClaim": "Claim"},
    "EmptyDir": {"medium": str, "sizeLimit": str},
    "Claim": {"claimName": str, "readOnly": bool},
    "ServiceSpec": {
        "clusterIP": str,
        "publishNotReadyAddresses": bool,
        "selector": "map",
        "ports": ["ServicePort"],
        "type": str,
    },
    "ServicePort": {"name": str, "port": int, "protocol": str, "targetPort": int},
    "TrainJobSpec": {"runtimeRef": "RuntimeRef", "trainer": "Trainer", "suspend": bool, "activeDeadlineSeconds": int},
    "RuntimeRef": {"name": str, "apiGroup": str, "kind": str},
    "Trainer": {
        "image": str,
        "command": [str],
        "args": [str],
        "env": ["EnvVar"],
        "numNodes": int,
        "numProcPerNode": int,
        "resourcesPerNode": "ResourceRequirements",
    },
}
REQUIRED = {
    "Job": ("apiVersion", "kind", "metadata", "spec"),
    "Service": ("apiVersion", "kind", "metadata", "spec"),
    "TrainJob": ("apiVersion", "kind", "metadata", "spec"),
    "ObjectMeta": (),
    "JobSpec": ("template",),
    "PodTemplateSpec": ("spec",),
    "PodSpec": ("containers", "restartPolicy"),  # a Job rejects the default, "Always"
    "Container": ("name", "image"),
    "EnvVar": ("name",),
    "SecretKeySelector": ("key",),
    "VolumeMount": ("name", "mountPath"),
    "Volume": ("name",),
    "Claim": ("claimName",),
    "ServicePort": ("port",),
    "TrainJobSpec": ("runtimeRef",),
    "RuntimeRef": ("name",),
}
VALUES = {
    "completionMode": ("Indexed", "NonIndexed"),
    "restartPolicy": ("Never", "OnFailure"),
    "apiVersion": ("v1", "batch/v1", "trainer.kubeflow.org/v1alpha1"),
    "medium": ("", "Memory"),
}


def find_mistakes(value: Any, kind: Any, where: str = "") -> list[str]:
    """Unknown fields, missing fields, and values of the wrong type."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [
            text for number, item in enumerate(value) for text in find_mistakes(item, kind[0], f"{where}[{number}]")
        ]
    if isinstance(kind, type):
        return [] if type(value) is kind else [f"{where}: {value!r} is not {kind.__name__}"]
    if not isinstance(value, dict):
        return [f"{where}: not an object"]
    if kind in ("map", "quantities"):
        allowed = (str,) if kind == "map" else (str, int)
        return [f"{where}.{key}: {item!r}" for key, item in value.items() if not isinstance(item, allowed)]
    fields = OBJECTS[kind]
    found = [f"{where}.{key}: no such field of {kind}" for key in value if key not in fields]
    found += [f"{where}: {kind} lacks {key}" for key in REQUIRED.get(kind, ()) if key not in value]
    found += [f"{where}.{key}: {value[key]!r}" for key, ok in VALUES.items() if key in value and value[key] not in ok]
    for key, item in value.items():
        if key in fields:
            found += find_mistakes(item, fields[key], f"{where}.{key}")
    return found
