"""Contrastive training with 256 pairs at once, 32 at a time: the loss sees all of them, memory sees 32.

Plain gradient accumulation would compare each pair with 31 others instead of 255. Run it:

    python examples/contrastive.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

ROWS, MICRO_BATCH, FEATURES = 256, 32, 20


class Towers(nn.Module):
    """Two encoders whose outputs are to be close for the two halves of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = self.tower(), self.tower()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def tower(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text)), self.log_scale.exp()


def clip_loss(image: Tensor, text: Tensor, scale: Tensor, rows: Tensor) -> ab.Total:
    """CLIP's loss of some rows among all: called block by block, so that no 256 x 256 table is held."""
    there = F.cross_entropy(scale * image[rows] @ text.T, rows, reduction="sum")
    back = F.cross_entropy(scale * text[rows] @ image.T, rows, reduction="sum")
    return ab.Total((there + back) / 2, len(rows))


def pairs() -> tuple[Tensor, Tensor]:
    """The same thing seen twice, with noise."""
    thing = torch.randn(ROWS, FEATURES)
    return thing + 0.3 * torch.randn_like(thing), thing + 0.3 * torch.randn_like(thing)


def main() -> None:
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = ab.Step(model, ab.WholeBatch(clip_loss, loss_rows=64), optimizer, micro_batch=MICRO_BATCH)
    for update in range(60):
        report = step(pairs())
        if update % 20 == 0:
            print(f"update {update}: loss {report.loss:.3f}")
    print(f"last: loss {report.loss:.3f}, chance would be {torch.tensor(float(ROWS)).log():.3f}")


if __name__ == "__main__":
    main()
