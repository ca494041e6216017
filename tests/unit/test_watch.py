"""A watched run: access, the rows that viewers receive, and the end of the run."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from urllib.parse import urlsplit

import pytest

from paceline.errors import ConfigError
from paceline.records.environment import capture_environment
from paceline.records.training import METRICS_FILE, MetricsLog
from paceline.runtime.ranks.session import Session, lock_folder
from paceline.verbs import attach as attaching
from paceline.verbs import watch as watching
from paceline.verbs.watch import Follower, serve, watch
from tests.unit.made_runs import make_folder, make_rows, note_end
from tests.unit.test_page import HOSTILE, RESULTS, expect_inert, list_points, read_data

ROWS = make_rows()


@pytest.fixture
def running(tmp_path):
    """The folder of a running 10-step run and a way to stop its process."""
    folder = make_folder(tmp_path / "run", ROWS[:10], ended=False)
    handle = [lock_folder(folder)]

    def end():
        while handle:
            os.close(handle.pop())

    yield folder, end
    end()


@contextlib.contextmanager
def ask(address, path=None, **headers):
    """The response to a request."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=100)
    try:
        connection.request("GET", path or f"{parts.path}?{parts.query}", headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def read_event(answer):
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


def append(folder, *rows):
    with contextlib.closing(MetricsLog(folder / METRICS_FILE)) as log:
        log.append(*rows)


def test_without_the_token_nothing_is_shown(running):
    with serve(Follower(running[0])) as server:
        token = server.token
        for path in ("/", "/events", "/?token=", f"/?token={token}x", f"/{token}", "/events?token=x&from=0", "/x"):
            with ask(server.address, path) as answer:
                text = answer.read().decode()
                assert answer.status == 403 and token not in text and "paceline train" not in text
        with ask(server.address) as answer:
            assert answer.status == 200 and answer.headers["Referrer-Policy"] == "no-referrer"
        with ask(server.address, f"/other?token={token}") as answer:
            assert answer.status == 404
        assert server.server_address[0] == "127.0.0.1"


def test_rows_reach_all_viewers_once_and_in_order(running):
    folder, _ = running
    with serve(Follower(folder)) as server:
        with ask(server.address) as answer:
            live = read_data(answer.read().decode())["live"]
        assert live["how"] == "running" and live["from"] == (folder / METRICS_FILE).stat().st_size
        events = f"/events?token={server.token}&from={live['from']}"
        with ask(server.address, events) as one, ask(server.address, events) as two:
            for number in (10, 11):
                append(folder, ROWS[number])
                server.follower.update()
                for viewer in (one, two):
                    while not (event := read_event(viewer))["rows"]:
                        pass
                    assert [json.loads(line)["step"] for line in event["rows"]] == [ROWS[number]["step"]]
                    assert "rank" in event["now"] and not event["reload"]
            assert server.num_viewers == 2
        place = len((folder / METRICS_FILE).read_bytes())
        append(folder, ROWS[12])
        with ask(server.address, events, **{"Last-Event-ID": str(place)}) as again:  # a viewer that reconnects
            assert [json.loads(line)["step"] for line in read_event(again)["rows"]] == [13]


def test_an_incomplete_row_waits_for_its_end(running):
    folder, _ = running
    follower = Follower(folder)
    with (folder / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 11, "ep')
    assert follower.read(follower.place) == ([], follower.place, follower.place)


def test_rows_that_a_recovery_cut_off_are_forgotten_though_the_file_is_longer_again(running):
    folder, _ = running
    follower = Follower(folder)
    place = follower.place
    with contextlib.closing(MetricsLog(folder / METRICS_FILE, 8)) as log:
        log.append(*({**ROWS[number], "again": "x" * 40} for number in range(8, 13)))
    lines, begin, end = follower.read(place)
    assert begin == 0 and end > place and [json.loads(line)["step"] for line in lines] == list(range(1, 14))
    follower.update()
    assert [row["step"] for row in follower._recent] == list(range(1, 14))


def test_a_page_without_steps_is_loaded_again_when_there_are_some(tmp_path):
    folder = make_folder(tmp_path / "run", ROWS[:3], ended=False)
    content = (folder / METRICS_FILE).read_bytes()
    (folder / METRICS_FILE).unlink()
    handle = lock_folder(folder)
    try:
        with serve(Follower(folder)) as server:
            with ask(server.address) as answer:
                assert "no step taken yet" in answer.read().decode()
            with ask(server.address, f"/events?token={server.token}&from=0") as answer:
                (folder / METRICS_FILE).write_bytes(content)
                while not (event := read_event(answer))["rows"]:
                    pass
                assert event["reload"]
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", "Killed"), ("stopped", "interrupted"), ("finished", "Finished")],
)
def test_the_end_of_a_run_is_reported(running, monkeypatch, how, words):
    folder, end = running
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    with serve(Follower(folder)) as server:
        server.follower.update()
        assert server.follower.how == "running"
        with ask(server.address, f"/events?token={server.token}&from={server.follower.place}") as viewer:
            assert not read_event(viewer)["reload"]
            if how == "finished":
                _finish(folder, 10)
            elif how == "stopped":
                note_end(folder, "interrupted")
            end()
            server.follower.update()
            while not (event := read_event(viewer))["reload"]:
                pass
            assert words in event["status"] and "step 10" in event["status"]
        with ask(server.address) as answer:
            page = answer.read().decode()
        assert server.follower.how == read_data(page)["live"]["how"] == how and words in page


def _finish(folder, steps):
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"outcome": {"steps": steps, "world_size": 2}}))


def test_a_resumed_run_runs_again(running, monkeypatch):
    folder, end = running
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    end()
    follower = Follower(folder)
    follower.update()
    assert follower.how == "killed"
    handle = lock_folder(folder)
    try:
        follower.update()
        assert follower.how == "running"
    finally:
        os.close(handle)


def test_watching_ends_after_the_run_and_leaves_its_page(tmp_path, capsys):
    folder = make_folder(tmp_path / "run", ROWS)
    result = watch(folder, browser=False, linger=0.0, progress=False)
    said = capsys.readouterr().err
    assert result.steps == len(ROWS) and "http://127.0.0.1:" in said and "Finished: step 40" in said
    assert "Healthy" in (folder / "report.html").read_text()


def test_hostile_names_stay_text_on_the_live_page(tmp_path):
    folder = make_folder(tmp_path / "<img src=x>", ROWS[:4], ended=False, model=HOSTILE)
    with serve(Follower(folder)) as server, ask(server.address) as answer:
        expect_inert(answer.read().decode())


def test_another_run_and_a_port_in_use_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        watch(RESULTS / "neoverse-n1-2-cores" / "allreduce-2-ranks")
    assert caught.value.code == "other-verb"
    folder = make_folder(tmp_path / "run", ROWS[:4])
    with (
        serve(Follower(folder)) as server,
        pytest.raises(ConfigError, match="--port"),
        serve(Follower(folder), server.server_port),
    ):
        pass


def test_the_present_is_the_median_of_the_last_steps_of_each_rank(running):
    table = Follower(running[0]).now
    for rank, row in enumerate(table.rows):
        times = sorted(one["ranks"]["step_s"][rank] for one in ROWS[:10])
        assert row.step_s == pytest.approx((times[4] + times[5]) / 2)
    assert len(table.rows) == 2


# -- an attached program ----------------------------------------------------------------------------------------------


def write_steps(folder, rank, first, last, **more):
    """The file of a program's rank: 20 ms per step, including 5 ms of waiting for data on the second rank."""
    about = {"rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu", "host": "a", "threads": 1}
    steps = [(number, 0.02, 0.005 * rank, 0.001) for number in range(first, last + 1)]
    with (folder / f"rank-{rank}-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(about | more | {"steps": steps}) + "\n")


@pytest.mark.parametrize(
    ("code", "how"), [(0, "finished"), (1, "stopped"), (-9, "killed")], ids=["its end", "an error", "kill -9"]
)
def test_a_program_is_followed_by_steps_that_all_ranks_took_and_recording_did_not_slow(tmp_path, code, how):
    session = Session("watch", {"command": ["python", HOSTILE], "steps": 0}, 1, capture_environment(), progress=False)
    viewer = attaching._Viewer(session, tmp_path / "seen")
    files = attaching._Files(viewer.folder, 0)
    with serve(viewer) as server:
        with ask(server.address) as answer:
            assert "no step taken yet" in answer.read().decode()
        write_steps(viewer.folder, 0, 2, 12, windows=[["trace", 5, 7, 0]])
        viewer.follow(files)
        assert viewer.read(0) == ([], 0, 0)  # the other rank has not written any yet
        write_steps(viewer.folder, 1, 2, 9)
        viewer.follow(files)
        rows = [json.loads(line) for line in viewer.read(0)[0]]
        assert [row["step"] for row in rows] == [2, 3, 4, 8, 9]
        assert rows[0]["ranks"] == {"step_s": [0.02, 0.02], "data_wait_s": [0.0, 0.005]}
        assert viewer.how == "running" and "step 9, 20" in viewer.text and "25.0%" in viewer.text
        assert viewer.verdict[0].startswith("Data loading (rank 1) is the bottleneck")
        with ask(server.address) as answer:
            page = answer.read().decode()
        expect_inert(page)
        (points,) = list_points(read_data(page), "ranks", gid="ms:ranks.data_wait_s.1")
        assert points == [(step, 5.0) for step in (2, 3, 4, 8, 9)]
        write_steps(viewer.folder, 1, 10, 12)
        viewer.close(files, f"exit code {code}" if code else "")
        assert viewer.how == how and "step 12" in viewer.text
        assert ("signal 9" in viewer.text) == (code == -9) and ("exit code 1" in viewer.text) == (code == 1)
