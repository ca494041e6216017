"""Lightning starts the ranks itself: python lightning_module.py"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if self.global_rank == 0 and number % 20 == 0:
            print(f"batch {number} loss {loss.item():.10f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    dtype = torch.float64 if args.double else torch.float32
    inputs = torch.randn(args.steps * 32, 64, generator=torch.Generator().manual_seed(5), dtype=dtype)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=args.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true" if args.double else "32-true",
    )  # fmt: skip
    trainer.fit(model, loader)
    if args.save and trainer.is_global_zero:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
