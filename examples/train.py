"""A text classifier in plain torch, with a problem that many programs have.

    torchrun --nproc-per-node 2 examples/train.py
    paceline profile -- torchrun --nproc-per-node 2 examples/train.py

Sentences differ in length, so much of a batch is padding, and in each step the ranks wait for the longest batch. With
`--by-length`, which needs the class `ByLength` and one changed line, they do not.
"""

import argparse
import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, WIDTH, BATCH, PAD = 20_000, 128, 16, 0


class Sentences(Dataset):
    """Random words, in sentences of 8 to 256 words; the label is the parity of the first one."""

    def __init__(self, count: int) -> None:
        source = random.Random(1)
        self.lengths = [min(256, max(8, round(source.lognormvariate(4, 0.7)))) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (self.lengths[index],), generator=generator)
        return words, int(words[0]) % 2


def pad(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD), torch.tensor(labels)


class ByLength:
    """Batches of sentences of similar length, also across the ranks of a step."""

    def __init__(self, lengths: list[int], rank: int, ranks: int) -> None:
        ordered = sorted(range(len(lengths)), key=lengths.__getitem__)
        size = BATCH * ranks
        steps = [ordered[k : k + size] for k in range(0, len(ordered) - size + 1, size)]
        random.Random(2).shuffle(steps)
        self.batches = [step[rank::ranks] for step in steps]

    def __iter__(self):
        return iter(self.batches)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(self.embed(words), src_key_padding_mask=words == PAD)[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--by-length", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = Sentences(asked.steps * BATCH * ranks)
    if asked.by_length:
        loader = DataLoader(data, batch_sampler=ByLength(data.lengths, rank, ranks), collate_fn=pad)
    else:
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), collate_fn=pad)
    for step, (words, labels) in enumerate(itertools.islice(loader, asked.steps)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
