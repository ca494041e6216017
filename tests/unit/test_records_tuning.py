"""Steps of a tuning survive the disk, and such as cannot be are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from paceline.errors import RecordError
from paceline.records import Samples
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.steps import CALIBRATING, ROLES
from paceline.units import MIB
from tests.unit.made_tuning import MadeJob

JOB = MadeJob(noise=0.1)
PLAIN = JOB.build_step(random.Random(1), "plain", "plain", 0.04)
DISTURBED = JOB.build_disturbed(random.Random(1), MIB, 0.5, 0.5)
PLAN = JOB.build_plan_step(
    "cap", (1.0, 2.0), cap_bytes=MIB, bucket_bytes=(MIB, 12), source="emulated", note="confirmed"
)
SHORT = Samples(seconds=((1.0, 1.0),))


@pytest.mark.parametrize("record", [PLAIN, DISTURBED, PLAN], ids=lambda record: record.role)
def test_a_step_survives_json(record):
    read = record_from_json(json.loads(json.dumps(record_to_json(record))))
    assert read == record and type(read) is type(record)
    assert isinstance(read.bucket_bytes, tuple) and read.num_buckets == len(record.bucket_bytes)


def test_the_job_itself_does_not_calibrate():
    assert set(ROLES) - set(CALIBRATING) == {"job"}


@pytest.mark.parametrize(
    ("record", "changes", "words"),
    [
        (PLAIN, {"role": "guess"}, "guess"),
        (PLAIN, {"backward": SHORT}, "backward has other repetitions or ranks than the step"),
        (PLAIN, {"optimizer": Samples(seconds=((1.0,),) * 9)}, "optimizer has other repetitions or ranks"),
        (DISTURBED, {"overlapped": SHORT}, "overlapped has other repetitions"),
        (DISTURBED, {"num_messages": 0}, "only there"),
        (DISTURBED, {"message_bytes": 0}, "only there"),
        (DISTURBED, {"under_way": None}, "only there"),
        (DISTURBED, {"overlapped": None}, "only there"),
        (DISTURBED, {"role": "job"}, "only there"),
        (PLAIN, {"role": "disturbed"}, "only there"),
        (PLAIN, {"num_messages": -1}, "messages"),
        (PLAIN, {"message_bytes": 1}, "only there"),
        (PLAIN, {"under_way": PLAIN.timing}, "only there"),
        (PLAN, {"bucket_bytes": (MIB, -4)}, "negative"),
        (PLAN, {"cap_bytes": -1}, "negative"),
        (PLAN, {"world_size": 0}, "0 ranks"),
        (PLAN, {"source": "dreamt"}, "dreamt"),
    ],
)
def test_what_cannot_be_is_refused(record, changes, words):
    with pytest.raises(RecordError, match=words):
        replace(record, **changes)
