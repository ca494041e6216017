"""Made-up traces in ms, of which the tests know what they should say."""

from __future__ import annotations

from typing import Any

from paceline.predict.traces import Event, RankTrace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SGEMM, TENSOR_GEMM = "ampere_sgemm_128x64_nn", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"


class MadeTrace:
    """Events by their begin and end in ms; host events on thread 1, kernels on stream 7."""

    def __init__(self, rank: int = 0, origin_ms: float = 0.0, properties: dict[str, Any] | None = None) -> None:
        self.rank, self.origin_ms = rank, origin_ms
        self.properties = [properties] if properties else []
        self.events: list[Event] = []

    def add(self, kind: str, name: str, begin: float, end: float, tid: object = None, **arguments: Any) -> MadeTrace:
        on_device = kind in ("kernel", "gpu_memcpy", "gpu_memset")
        place = (0, tid or 7) if on_device else (100, tid or 1)
        self.events.append(
            {
                "ph": "X", "cat": kind, "name": name, "pid": place[0], "tid": place[1], "ts": begin * 1e3,
                "dur": (end - begin) * 1e3, "args": arguments,
            }
        )  # fmt: skip
        return self

    def step(self, begin: float = 0.0, end: float = 10.0, number: int = 0) -> MadeTrace:
        return self.add("user_annotation", f"step {number}", begin, end)

    def phase(self, name: str, begin: float, end: float) -> MadeTrace:
        return self.add("user_annotation", name, begin, end)

    def op(self, name: str, begin: float, end: float, **options: Any) -> MadeTrace:
        return self.add("cpu_op", name, begin, end, **options)

    def kernel(self, name: str, begin: float, end: float, **arguments: Any) -> MadeTrace:
        return self.add("kernel", name, begin, end, **arguments)

    def bucket(self, begin: float, end: float, num_bytes: int = 2**20) -> MadeTrace:
        return self.add("bucket", "bucket", begin, end, tid="buckets 0", bytes=num_bytes)

    def build(self) -> RankTrace:
        device = "cuda" if any(event.get("cat") == "kernel" for event in self.events) else "cpu"
        return RankTrace(self.rank, 2, device, "box", round(self.origin_ms * 1e6), self.events, self.properties)
