"""Train large batches in your own loop: LARS, warm-up, and a growing batch with an exact sample order.

python examples/large_batch.py
"""

import torch

import paceline

EPOCHS, SAMPLES, BATCH = 8, 512, 16

torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 20)
targets = (inputs @ torch.randn(20, 4)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model = paceline.GhostBatchNorm.convert(model, ghost_size=BATCH)  # uses statistics over 16 samples at any batch size

# Grow the batch instead of decaying the learning rate: 16 samples per step, 64 after half the run, 256 after 3/4.
sizes = paceline.BatchSchedule(
    global_batch_size=BATCH, num_samples=SAMPLES, epochs=EPOCHS, growths=((0.5, 4), (0.75, 16))
)
rates = paceline.Schedule(shape="constant", peak=0.5, num_steps=sizes.num_steps, warmup_steps=10)
optimizer = paceline.LARS(paceline.split_parameters(model, weight_decay=1e-4), lr=rates.peak, trust_coefficient=0.02)

step = 0
for epoch in range(EPOCHS):
    order = paceline.EpochOrder(SAMPLES, sizes.window_sizes(epoch), seed=1, epoch=epoch)
    for number in range(order.num_windows):  # visits every sample once, in an order independent of the batch size
        batch = order.window(number)
        rates.apply(optimizer, step)
        torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1

model.eval()
accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
print(f"{step} steps, the last of {len(batch)} samples; accuracy {accuracy:.0%}")
