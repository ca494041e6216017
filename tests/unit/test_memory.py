"""Memory over one step, from synthetic allocations (bytes, µs) of known purpose."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from paceline.measure.recorder import list_blocks
from paceline.predict.memory_use import CATEGORIES, MARK, MemoryMark, MemoryMarks, MemoryUse, build_memory
from paceline.predict.traces import build_overview, overview_from_json, overview_to_json
from paceline.report.profiles import MEMORY, describe_memory, list_memory, plot_memory
from paceline.report.table import Table
from tests.unit.made_traces import MadeTrace


class MadeMemory:
    """Marks, and allocations by address. `kind` is the device type: 0 for CPU, 1 for GPU."""

    def __init__(self, kind: int = 0) -> None:
        self.kind, self.events, self.marks = kind, list[dict[str, Any]](), list[MemoryMark]()

    def mark(self, at: float, phase: str = "", took: float = 0.0, **seen: tuple[int, int]) -> MadeMemory:
        name = f"{MARK} {len(self.marks)}"
        self.events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": at, "dur": took})
        self.marks.append(MemoryMark(phase, tuple((*block, category) for category, block in seen.items())))
        return self

    def change(self, at: float, address: int, size: int, total: int = 0, index: int = 0) -> MadeMemory:
        said = {"Addr": address, "Bytes": size, "Device Type": self.kind, "Device Id": index, "Total Allocated": total}
        self.events.append({"ph": "i", "name": "[memory]", "ts": at, "pid": 1, "tid": 1, "args": said})
        return self

    def build_marks(self, allocated_bytes: int | None = None) -> MemoryMarks:
        return MemoryMarks("cuda" if self.kind else "cpu", 0, allocated_bytes, tuple(self.marks))

    def build(self, allocated_bytes: int | None = None) -> MemoryUse:
        return build_memory(self.events, self.build_marks(allocated_bytes))


def make_step() -> MadeMemory:
    """Parameters at 1 (100 bytes) and momentum at 2 (100) existed before; a block of unknown use at 3 dates from the
    last step. Peak: 100 + 100 + 7 + 20 of data + 40 of activations + 100 of gradients + 30."""
    known = {"parameters": (1, 100), "optimizer": (2, 100)}
    made = MadeMemory().change(5, 3, 7)
    made.mark(10, "data", **known).change(11, 10, 20).change(12, 11, 5).change(13, 11, -5)
    made.mark(20, "forward", **known).change(21, 20, 40).change(22, 21, 8).change(23, 21, -8)
    made.mark(30, "backward", **known).change(31, 22, 30).change(32, 23, 60)
    made.mark(32.5, gradients=(23, 60)).change(33, 24, 40).change(34, 22, -30).change(35, 20, -40)
    made.mark(40, "optimizer", **known, gradients=(24, 40)).change(41, 25, 9).change(42, 25, -9)
    made.change(43, 23, -60).change(44, 24, -40).change(45, 26, 3)
    return made.mark(50, "end", **known).change(55, 10, -20).change(56, 27, 1000)


def test_a_block_is_classified_by_its_use_or_its_lifetime():
    memory = make_step().build()
    rows = {row.category: row for row in list_memory(memory)}
    assert {name: row.begin_bytes for name, row in rows.items() if row.begin_bytes} == {
        "parameters": 100, "optimizer": 100, "other": 7, "total": 207,
    }  # fmt: skip
    assert {name: row.peak_bytes for name, row in rows.items() if row.peak_bytes} == {
        "parameters": 100, "optimizer": 100, "gradients": 100, "data": 20, "activations": 40, "temporary": 30,
        "other": 7, "total": 397,
    }  # fmt: skip
    assert {name: row.end_bytes for name, row in rows.items() if row.end_bytes} == {
        "parameters": 100, "optimizer": 100, "data": 20, "other": 10, "total": 230,
    }  # fmt: skip
    assert rows["temporary"].largest_bytes == 30 and rows["total"].largest_bytes == 397
    assert (memory.peak_bytes, memory.peak_phase, memory.times_s[memory.peak]) == (
        397,
        "backward",
        pytest.approx(23e-6),
    )
    for column in ("begin_bytes", "peak_bytes", "end_bytes", "share"):
        *parts, total = (getattr(row, column) for row in list_memory(memory))
        assert sum(parts) == pytest.approx(total)


def test_gradients_in_a_bucket_count_once_and_inputs_from_before_are_data():
    made = MadeMemory().mark(0, "data", buckets=(1, 64), gradients=(1, 64)).mark(1, "forward").mark(2, data=(9, 16))
    memory = made.change(3, 5, 8).mark(4, "backward").change(5, 5, -8).mark(6, "end", gradients=(1, 64)).build()
    rows = {row.category: row for row in list_memory(memory)}
    assert (rows["buckets"].begin_bytes, rows["buckets"].largest_bytes, rows["gradients"].largest_bytes) == (64, 64, 0)
    assert (rows["data"].begin_bytes, rows["data"].end_bytes) == (16, 16)
    assert (rows["activations"].largest_bytes, rows["activations"].end_bytes) == (8, 0)


def test_inputs_allocated_by_another_thread_are_not_counted_twice():
    made = MadeMemory().mark(0, "data").change(1, 9, 100).change(2, 9, -100).mark(3, "forward", data=(9, 16))
    totals = made.change(4, 8, 1).mark(5, "end").build().totals
    assert max(totals) == 100 and totals[-1] == 17


def test_memory_freed_by_another_thread_ends_at_its_next_allocation():
    made = MadeMemory().mark(0, "data").change(1, 9, 100).change(2, 9, 30).mark(3, "end")
    assert made.build().totals == [0, 100, 30, 30]


def test_on_a_gpu_the_total_is_the_allocators_and_unknown_memory_is_other():
    made = MadeMemory(1).mark(0, "data", parameters=(1, 100)).mark(1, "forward")
    made.change(2, 5, 512, 1712).change(2.5, 7, 4096, 9999, index=1).mark(3, "backward").change(4, 5, -512, 1200)
    made.change(5, 77, -200, 1000)  # allocated before the trace, so only the release is seen
    made.events.append(dict(made.events[1], cat="gpu_user_annotation", ts=1e6))
    memory = made.mark(6, "end").build(1200)
    assert memory.totals == [1200, 1712, 1200, 1000, 1000]
    rows = {row.category: row for row in list_memory(memory)}
    assert (rows["other"].begin_bytes, rows["other"].peak_bytes, rows["other"].end_bytes) == (1100, 1100, 900)
    assert rows["activations"].peak_bytes == 512
    assert MadeMemory(1).mark(0, "data", parameters=(1, 100)).mark(1, "end").build(300).totals == [300, 300]


def test_only_the_span_of_a_batch_in_a_larger_storage_is_data():
    corpus, cpu = torch.zeros(1000, dtype=torch.int64), torch.device("cpu")
    address, batch = corpus.data_ptr(), (corpus[100:164], corpus[101:165].view(8, 8))
    assert list_blocks({"data": batch}, cpu) == ((address, 65 * 8, "data"),)
    assert list_blocks({"data": corpus.view(10, 100)[:2, ::50]}, cpu) == ((address, 151 * 8, "data"),)
    assert list_blocks({"data": corpus}, cpu) == ((address, 8000, "data"),)
    # A gradient is a view of the bucket in which it is sent.
    assert list_blocks({"gradients": [corpus[:10]]}, cpu) == ((address, 8000, "gradients"),)
    assert list_blocks({"data": [corpus[:0], None]}, cpu) == list_blocks({"data": corpus}, torch.device("meta")) == ()


def test_the_inputs_of_a_sparse_embedding_are_not_gradients():
    embedding, ids, seen = torch.nn.Embedding(9, 4, sparse=True), torch.tensor([1, 3, 5]), list[Any]()
    node, cpu = get_gradient_edge(embedding.weight).node, torch.device("cpu")
    node.register_prehook(lambda grads: seen.append(list_blocks({"gradients": grads, "data": ids}, cpu)))
    embedding(ids).square().sum().backward()
    assert {category: size for _, size, category in seen[0]} == {"gradients": 3 * 4 * 4, "data": 3 * 8}
    assert len(seen[0]) == 2


def test_the_time_of_the_snapshot_belongs_to_no_phase():
    made = MadeMemory().mark(100, "data", took=50).change(160, 1, 8).mark(170, "forward", took=30)
    made.mark(210, took=5).change(225, 2, 8).mark(230, "backward", took=10).mark(250, "end", took=40)
    memory = made.build()
    assert [round(time_s * 1e6, 3) for time_s in memory.times_s] == [0, 10, 40, 55]
    spans = [(phase.name, round(phase.begin_s * 1e6, 3), round(phase.end_s * 1e6, 3)) for phase in memory.phases]
    assert spans == [("data", 0, 20), ("forward", 20, 45), ("backward", 45, 55)]


def test_the_peak_names_the_innermost_operator_of_its_thread():
    made = make_step()
    for name, begin, end, tid in (("a", 32.6, 34, 1), ("b", 32.8, 33.5, 1), ("c", 32.9, 33.1, 2), ("d", 33.1, 33.2, 1)):
        op = {"ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "ts": begin, "dur": end - begin}
        made.events.append(op | {"pid": 1, "tid": tid})
    memory = made.build()
    assert memory.operator == "aten::b" and make_step().build().operator == ""
    assert describe_memory(memory) == "memory: peak 397 B in backward, 23 µs after the step began (aten::b)"


def test_a_long_timeline_is_thinned_but_keeps_its_peak_and_each_categorys_maximum():
    made = MadeMemory().mark(0, "data", parameters=(1, 1000)).mark(1, "forward")
    for number in range(5000):
        size = 77 if number == 4321 else 1 + number % 50
        made.change(2 + number, 9, size).change(2.5 + number, 9, -size)
    memory = made.change(6000, 8, 500).change(6001, 8, -500).mark(7000, "end").build()
    assert len(memory.times_s) < 620 and memory.peak_bytes == 1500
    assert {one.category: one.largest_bytes for one in memory.held}["temporary"] == 500


def test_a_thinned_timeline_does_not_hold_freed_memory():
    made = MadeMemory().mark(0, "data").change(1, 9, 900).change(2, 9, -900)
    for number in range(1000):  # nothing is larger, so the first interval peaks at its start
        made.change(10 + number, 8, 1).change(10.5 + number, 8, -1)
    memory = made.mark(5000, "end").build()
    assert max(total for time_s, total in zip(memory.times_s, memory.totals, strict=True) if time_s > 1e-6) == 1
    assert min(memory.totals[memory.peak : memory.peak + 3]) == 0


def test_a_categorys_maximum_is_kept_even_where_the_total_is_low():
    made = MadeMemory().mark(0, "data").mark(1, "backward")
    for number in range(2000):
        made.change(2 + number, 9, 900).change(2.5 + number, 9, -900)
        if number == 1234:
            made.change(2.6 + number, 8, 60).mark(2.7 + number, gradients=(8, 60)).change(2.8 + number, 8, -60)
    memory = made.mark(3000, "end").build()
    assert {one.category: one.largest_bytes for one in memory.held if one.largest_bytes} == {
        "gradients": 60, "temporary": 900,
    }  # fmt: skip


def test_memory_is_part_of_an_overview_and_survives_json():
    made, trace = make_step(), MadeTrace().step().build()
    overview = build_overview(replace(trace, events=[*trace.events, *made.events], memory=made.build_marks()))
    assert overview.memory == made.build()
    document = json.loads(json.dumps(overview_to_json(overview)))
    assert overview_from_json(document) == overview
    assert build_overview(MadeTrace().step().build()).memory is None


def test_the_picture_stacks_the_categories_and_marks_phases_and_peak():
    memory = make_step().build()
    figure = plot_memory(memory, "cnn", "box")
    (axes,) = figure.axes
    assert {"forward", "backward", "peak 397 B"} <= {text.get_text() for text in axes.texts}
    areas = {area.get_label(): area for area in axes.collections}
    assert list(areas) == [name for name in CATEGORIES if name != "buckets"]
    assert areas["other"].get_paths()[0].get_extents().ymax * 2**20 == pytest.approx(397)
    plot_memory(MadeMemory().mark(0, "data", data=(1, 1)).mark(0, "end").build(), "", "").draw_without_rendering()


def test_the_table_has_a_row_for_each_category_and_the_total():
    table = Table("memory", "", MEMORY, list_memory(make_step().build()))
    assert [row["category"] for row in table.rows_json()] == [*CATEGORIES, "total"]
    assert "| total | 207 B | 397 B | 100.0% | 230 B | 397 B | 275 B | 397 B | 336 B |" in table.markdown()
    narrow, wide = (table.terminal(width).splitlines()[0] for width in (60, 120))
    assert "in forward" not in narrow and "in optimizer" in wide


def test_each_category_has_its_largest_of_each_phase():
    memory = make_step().build()
    rows = {row.category: row.by_phase for row in list_memory(memory)}
    names = ("forward", "backward", "optimizer")
    assert [[rows[category][name] for name in names] for category in ("activations", "gradients", "temporary")] == [
        [40, 40, 0], [0, 100, 100], [8, 30, 9],
    ]  # fmt: skip
    assert rows["data"] == dict.fromkeys(("data", *names), 20)
    # With several micro-batches, the largest one counts.
    again = replace(memory, phases=(*memory.phases, replace(memory.phases[1], largest_bytes=(1,) * 8 + (500,))))
    assert list_memory(again)[-1].by_phase["forward"] == 500 and list_memory(again)[5].by_phase["forward"] == 40
