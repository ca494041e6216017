"""Find this process's rank in the world and on a two-dimensional mesh, with `get` and with the typed `Ranks`.

python examples/who_am_i.py
"""

from torch.distributed.device_mesh import init_device_mesh

import paceline

get = paceline.get


def describe() -> str:
    with paceline.init("gloo", "cpu", announce=None):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
        get.register_mesh(mesh["gpu"])  # from now on, `get` refers to this mesh
        inside, world = paceline.ranks(), get("ws", mesh)
        return f"global rank {get('grank')} of {world} is rank {inside.rank} of {inside.world_size} on its row"


if __name__ == "__main__":
    for line in paceline.run_ranks(describe, 4):
        print(line)
