"""A loss of sentence-transformers over 256 pairs, 32 at a time: one wrapper around the loss. Run it:

python examples/in_sentence_transformers.py
"""

import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from anybatch.homes.sentence_transformers import CutLoss

WORDS, LENGTH = 200, 8


class Encoder(nn.Module):
    """Stands for a SentenceTransformer, which would have to be downloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 32), nn.Linear(32, 32)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.mix(self.words(features["input_ids"]).mean(1).tanh())}


def pairs() -> list[dict[str, Tensor]]:
    """Rows of words, and the same rows with two words replaced."""
    anchor = torch.randint(WORDS, (256, LENGTH))
    positive = anchor.clone()
    positive[:, :2] = torch.randint(WORDS, (256, 2))
    return [{"input_ids": anchor}, {"input_ids": positive}]


def main() -> None:
    torch.manual_seed(0)
    model = Encoder()
    loss_of = CutLoss(MultipleNegativesRankingLoss(model), micro_batch=32)  # the line that changes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(60):
        loss = loss_of(pairs(), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % 20 == 0:
            print(f"update {update}: loss {loss.item():.3f}")
    print(f"last: loss {loss.item():.3f} in {loss_of.batch_loss.report.micro_batches} micro-batches")


if __name__ == "__main__":
    main()
