"""accelerate with 256 rows an update, 32 at a time: two lines of the loop change. Run it:

python examples/in_accelerate.py
accelerate launch --cpu --num_processes 2 examples/in_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(1024, 8)
    rows = DataLoader(TensorDataset(x, x[:, :4].argmax(-1)), batch_size=256)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    model, optimizer, rows, scheduler = accelerator.prepare(model, optimizer, rows, scheduler)

    batch_loss = ab.BatchLoss(model, nn.CrossEntropyLoss(), micro_batch=32)  # the first line
    for _ in range(10):
        for batch in rows:
            loss = batch_loss(batch)  # the second: was loss = F.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    cut = batch_loss.report.micro_batches if batch_loss.report else 0
    accelerator.print(f"{cut} micro-batches an update, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
