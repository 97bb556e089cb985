"""Lightning with 256 rows an update, 32 at a time: one callback, the module unchanged. Run it:

python examples/in_lightning.py
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch.homes.lightning import WholeBatchCallback


class Tagger(pl.LightningModule):
    """Labels for the tokens of rows of unequal length; padding is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        loss = F.cross_entropy(self.net(x).flatten(0, 1), labels.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(1024, 12, 8)
    is_token = torch.arange(12) < torch.randint(1, 13, (1024, 1))
    labels = x[..., :4].argmax(-1).where(is_token, -100)
    whole_batch = WholeBatchCallback(micro_batch=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=10,
        callbacks=[whole_batch],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tagger(), DataLoader(TensorDataset(x, labels), batch_size=256, shuffle=True))
    cut = whole_batch.report.micro_batches if whole_batch.report else 0
    print(f"{trainer.global_step} updates of {cut} micro-batches, loss {trainer.logged_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
