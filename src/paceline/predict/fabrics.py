"""Published all-reduce times: the data behind the networks that are not based on data sheets.

Every table has its source. Times are out-of-place averages of nccl-tests in microseconds, for doubling sizes.
"""

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class PublicSweep:
    """One published table: `times_us` of messages of `first_bytes`, twice as many, and so on."""

    source: str
    hardware: str
    ranks: int
    nodes: int
    first_bytes: int
    times_us: tuple[float, ...]

    @property
    def points(self) -> list[tuple[int, float]]:
        """(bytes, seconds), in ascending order."""
        return [(self.first_bytes << place, time_us * 1e-6) for place, time_us in enumerate(self.times_us)]


def _sweep(source: str, hardware: str, ranks: int, nodes: int, first_bytes: int, times_us: str) -> PublicSweep:
    return PublicSweep(source, hardware, ranks, nodes, first_bytes, tuple(map(float, times_us.split())))


_ABCI = "github.com/aistabci/abci2.0benchmark, allreduce (NCCL 2.8.4)"
_A, _V = "ABCI 2.0: 8 A100 SXM4 and 4 HDR links a node", "ABCI: 4 V100 SXM2 and 2 EDR links a node"
_GUIDE = "the guide 'How to unlock P2P on RTX4090?' on GitHub"
_NOTES = "notes on nccl-tests with 8 A100 on GitHub ('thanos', mpirun)"

A100 = (
    _sweep(_ABCI, _A, 4, 1, KIB, "14.31 15.63 15.53 16.72 19.98 24.86 27.08 31.71 42.28 56.78 83.97 97.32 128.3 138.6 "
           "211.9 298.4"),
    _sweep(_ABCI, _A, 8, 1, KIB, "19.83 22.37 25.44 25.73 28.22 35.73 40.35 42.99 48.36 58.70 75.86 116.6 142.4 204.5 "
           "250.3 360.6"),
    _sweep(_NOTES, "8 A100 SXM4 80 GB", 8, 1, KIB, "24.43 24.32 25.29 25.84 26.15 30.25 31.82 31.90 27.65 28.11 37.89 "
           "55.39 81.66 130.6 213.3 377.6 615.7 1181.6 2218.2 4248.8 8244.5 16288 32285"),
)  # fmt: skip
A100_NODES = (
    _sweep(_ABCI, _A, 16, 2, KIB, "36.44 37.83 40.52 43.42 44.99 49.51 57.59 79.20 88.05 108.3 146.5 197.8 288.8 534.8 "
           "1026.0 1887.3"),
    _sweep(_ABCI, _A, 32, 4, KIB, "50.20 53.70 55.59 56.20 59.70 63.81 76.42 105.5 113.4 127.7 153.5 226.6 367.5 567.1 "
           "1090.2 2075.4"),
    _sweep(_ABCI, _A, 64, 8, KIB, "63.53 66.06 66.33 67.61 70.23 74.75 87.36 110.7 130.8 152.3 208.6 334.2 587.8 "
           "1132.4 2034.1 4342.8"),
    _sweep(_ABCI, _A, 128, 16, KIB, "74.13 76.74 79.08 79.95 87.51 87.85 102.9 203.2 147.7 164.4 199.9 309.7 420.1 "
           "773.6 1341.2 2500.7"),
)  # fmt: skip
V100 = (
    _sweep(_ABCI, _V, 4, 1, KIB, "9.47 10.48 10.98 13.30 17.20 20.27 22.34 26.31 34.39 63.76 77.21 101.8 101.3 148.4 "
           "255.3 449.9"),
)  # fmt: skip
V100_NODES = (
    _sweep(_ABCI, _V, 8, 2, KIB, "23.33 24.37 29.60 31.96 37.24 47.40 53.15 60.06 91.96 150.0 198.7 287.9 445.6 792.6 "
           "1511.2 2970.9"),
    _sweep(_ABCI, _V, 16, 4, KIB, "37.45 43.63 49.80 53.62 57.01 76.70 97.05 98.85 104.3 173.3 295.6 400.7 585.5 928.2 "
           "1633.2 3156.6"),
    _sweep(_ABCI, _V, 32, 8, KIB, "49.50 57.47 66.18 70.14 74.15 104.4 162.4 186.6 191.1 195.4 337.7 592.7 810.6 "
           "1183.3 1895.4 3319.4"),
    _sweep(_ABCI, _V, 64, 16, KIB, "61.77 71.49 82.46 94.91 98.15 131.0 209.3 343.5 365.2 367.9 380.7 697.3 986.0 "
           "1537.3 2376.4 3857.6"),
    _sweep(_ABCI, _V, 128, 32, KIB, "74.91 87.32 100.3 104.0 133.7 161.6 259.0 433.8 492.0 729.6 507.1 800.4 1096.3 "
           "1663.3 3677.4 5031.7"),
)  # fmt: skip
# The H20 has the same NVLink as the H100.
H100 = (
    _sweep("the NCCL guide for DigitalOcean's bare metal on GitHub", "2 of 8 H100 SXM5", 2, 1, KIB,
           "15.75 14.16 13.10 12.32 12.17 12.68 14.05 15.62 17.68 17.23 26.30 30.67 35.13 47.86 73.28 127.7 223.4 "
           "415.0 792.7 1541.7 2996.1"),
    _sweep("github.com/deepseek-ai/DeepEP/issues/303", "8 H20", 8, 1, KIB, "16.38 16.49 16.69"),
    _sweep("github.com/NVIDIA/nccl-tests/issues/306", "8 H20", 8, 1, MIB, "35.66 38.34 52.73 79.28 117.9 215.4 362.9 "
           "702.6 1367.0 2672.4 5252.0 10407"),
    _sweep("github.com/NVIDIA/nccl-tests/issues/290", "8 H100 SXM5", 8, 1, 128 * MIB, "613.3 1139.2 2175.8 4038.8 "
           "8020.3 15870"),
)  # fmt: skip
H100_NODES = (
    _sweep("github.com/stas00/ml-engineering, network benchmarks", "4 nodes of 8 GPUs with RDMA", 32, 4, 32 * KIB,
           "68.27 78.96 82.96 98.18 110.8 118.6 170.8 201.6 236.8 346.1 661.0 1531.5 2947.2 5715.0 11189 22098 44898 "
           "90363 181299 363057"),
)  # fmt: skip
H100_HALF = (
    _sweep("github.com/NVIDIA/nccl/issues/1411", "4 of 8 H100 SXM5 on each of 2 nodes, 4 links", 8, 2, 2 * MIB,
           "122.3 103.1 157.1 244.7 432.4 825.4 1493.1 2946.6"),
)  # fmt: skip
H100_TCPXO = (
    _sweep("github.com/lessizzmore/create-a3mega-ztan-fork", "8 H100 SXM5 and 8 links of 200 Gb/s a node (TCPXO)", 16,
           2, KIB, "147.1 125.8 126.9 131.6 138.6 155.2 159.4 159.3 167.1 174.2 203.2 254.0 364.6 571.9 977.6 1059.9 "
           "1261.6 1652.2 2360.9 3817.5 6759.0 12646 24361 47535"),
)  # fmt: skip
H200_ROCE = (
    _sweep("github.com/google/dranet, MPI Operator on GKE", "1 H200 and one link of 400 Gb/s (RoCE) a node", 2, 2, KIB,
           "35.59 31.80 33.56 39.33 41.89 45.47 54.03 51.86 79.10 76.88 98.57 131.9 227.5 415.7 811.3 1609.7 2250.8 "
           "4440.0 8635.4 17077 33860 67521 134734 269368"),
    _sweep("github.com/NVIDIA/nccl-tests/issues/232", "1 H100 and 4 links a node", 2, 2, 2 * MIB,
           "113.2 154.4 231.4 420.5 812.3"),
)  # fmt: skip
GH200 = (
    _sweep("CSCS, NCCL Tests container with CXI (quay.io/ethcscs/nccl-tests)", "Alps: 4 GH200 and 4 Slingshot-11 links "
           "a node", 8, 2, KIB, "22.14 24.00 34.41 39.07 39.81 40.36 65.50 80.50 123.3 122.7 136.7 182.1 294.6 341.2 "
           "442.8 686.2 1014.8 1773.7"),
)  # fmt: skip
MI250X = (
    _sweep("github.com/ROCm/rccl/issues/1490", "4 nodes of 8 MI250X dies and 4 Slingshot-11 links", 32, 4, 64 * KIB,
           "78.91 101.6 157.8 202.4 289.5 265.7 366.0 1184.5 760.7 1326.7 2444.7 3486.7 6326.1 11268 22500 44867 "
           "89585"),
)  # fmt: skip
PCIE4 = (
    _sweep("the README of pptest_driver on GitHub", "4 RTX 4090 with peer access", 4, 1, KIB,
           "18.46 18.62 18.71 18.91 21.03 21.17 25.25 38.63 62.98 89.57 118.6 184.1 310.5 545.7 1021.4 2013.3 4003.2 "
           "7967.8 15918 31829 63624"),
    _sweep(_GUIDE, "8 RTX 4090 through the host", 8, 1, KIB,
           "44.04 42.91 43.18 44.02 43.10 44.18 45.66 67.27 124.8 196.9 222.8 373.4 580.8 1041.8 1972.8 3905.6 7907.1 "
           "16253"),
    _sweep(_GUIDE, "8 RTX 4090 with peer access", 8, 1, KIB,
           "41.70 41.74 42.35 42.14 43.19 42.17 47.58 72.03 119.7 166.6 216.1 321.5 478.7 798.6 1472.8"),
)  # fmt: skip
PCIE3 = (
    _sweep("github.com/NVIDIA/nccl/issues/445", "4 GPUs over PCIe", 4, 1, 256 * KIB,
           "122.3 198.8 349.1 670.8 1312.7 2605.3 5183.1 10339 20653 41278 82503 164854 328867"),
)  # fmt: skip
