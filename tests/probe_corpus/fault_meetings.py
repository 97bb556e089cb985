"""Faults in models: rows meet, through statistics, an axis taken for another, or a place that is scarce."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import CLASSES, WIDTH, images, mlp, numbers, series, vectors

FAULTS: list[Make] = []
fault = partial(entry, FAULTS)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


@fault("meeting", culprit=r"2\.norm")
def batch_norm_at_a_depth() -> Case:
    """The first block is sound, so the second must be named."""
    blocks = nn.Sequential(nn.Conv2d(2, 4, 3), Block(nn.GroupNorm(2, 4)), Block(nn.BatchNorm2d(4)))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=images())


@fault("meeting", culprit="BatchNorm1d")
def batch_norm_in_a_perceptron() -> Case:
    return Case(
        model=mlp(nn.BatchNorm1d(6)), loss=nn.MSELoss(), batch=(torch.randn(8, WIDTH), torch.randn(8, 3))
    )


@fault("meeting", culprit="BatchNorm1d")
def batch_norm_without_running_statistics() -> Case:
    """`eval()` does not help here: there is nothing to use but the batch."""
    model = mlp(nn.BatchNorm1d(6, track_running_stats=False)).eval()
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=vectors())


@fault("meeting", culprit="BatchNorm1d")
def batch_norm_before_dropout() -> Case:
    return Case(model=mlp(nn.BatchNorm1d(6), nn.Dropout(0.4)), loss=nn.CrossEntropyLoss(), batch=vectors())


class Standardise(nn.Module):
    """A layer of one's own around the functional form."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@fault("meeting", culprit="Standardise")
def functional_batch_norm() -> Case:
    return Case(model=mlp(Standardise()), loss=nn.CrossEntropyLoss(), batch=vectors())


class Centre(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)


@fault("meeting", culprit="Centre")
def batch_mean_subtracted() -> Case:
    return Case(model=mlp(Centre(), nn.Linear(6, 6), nn.Tanh()), loss=nn.CrossEntropyLoss(), batch=vectors())


class Gate(nn.Module):
    """Attention weights over the wrong axis."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scores(x).softmax(dim=0)


@fault("meeting", culprit="Gate")
def softmax_over_the_rows() -> Case:
    return Case(model=mlp(Gate()), loss=nn.CrossEntropyLoss(), batch=vectors())


class Spread(nn.Module):
    """The standard deviation over the batch as one more feature (Karras et al. 2018, section 3)."""

    def forward(self, x: Tensor) -> Tensor:
        spread = (x.var(dim=0, unbiased=False) + 1e-8).sqrt().mean()
        return torch.cat([x, spread.expand(len(x), 1)], dim=1)


@fault("meeting", culprit="Spread")
def spread_of_the_batch_as_a_feature() -> Case:
    model = nn.Sequential(nn.Linear(WIDTH, 6), Spread(), nn.Linear(7, 1))
    return Case(
        model=model, loss=nn.BCEWithLogitsLoss(), batch=(torch.randn(8, WIDTH), torch.rand(8, 1).round())
    )


class Attentive(nn.Module):
    """Reads (rows, time, features) with attention that was told nothing about the order of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.attention(x, x, x, need_weights=False)
        return self.head((x + seen).mean(dim=1))


@fault("meeting", culprit="attention")
def attention_across_rows() -> Case:
    return Case(model=Attentive(), loss=nn.CrossEntropyLoss(), batch=series())


@fault("meeting", culprit="encoder|Transformer|self_attn")
def batch_first_forgotten_in_an_encoder() -> Case:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=8, dropout=0.1)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(dim=1))

    return Case(model=Classifier(), loss=nn.CrossEntropyLoss(), batch=series())


@fault("meeting", culprit="rnn|GRU")
def batch_first_forgotten_in_a_gru() -> Case:
    """Rows are read as time: a row sees only those before it."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0].mean(dim=1))

    return Case(model=Reader(), loss=nn.CrossEntropyLoss(), batch=series())


@fault("meeting", "position", culprit="Reshaped")
def view_in_place_of_transpose() -> Case:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            rows, time, features = x.shape
            return self.head(self.rnn(x.reshape(time, rows, features))[0][-1])

    return Case(model=Reshaped(), loss=nn.CrossEntropyLoss(), batch=series())


class Router(nn.Module):
    """Sends each row to one of two experts; those for which there is no room pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(dim=1)
        room = max(1, len(x) // 2)
        out = x
        for index, expert in enumerate(self.experts):
            sent = (shares.argmax(dim=1) == index).nonzero()[:room, 0]
            out = out.index_add(0, sent, expert(x[sent]) * shares[sent, index, None])
        return out


@fault("meeting", "position", culprit="Router")
def router_with_capacity() -> Case:
    model = mlp(Router())
    with torch.no_grad():
        model[2].gate.bias.copy_(torch.tensor([1.5, -1.5]))  # most rows want the first expert
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=vectors())


class Scaled(nn.Module):
    """Normalises its inputs by what it finds in the batch."""

    def __init__(self, scale: str) -> None:
        super().__init__()
        self.body, self.scale = mlp(), scale

    def forward(self, x: Tensor) -> Tensor:
        size = x.detach().abs()
        return self.body(x / (size.max() if self.scale == "max" else size.flatten().quantile(0.75)))


@fault("meeting", culprit="Scaled")
def inputs_divided_by_their_largest() -> Case:
    return Case(model=Scaled("max"), loss=nn.CrossEntropyLoss(), batch=vectors())


@fault("meeting", culprit="Scaled")
def inputs_divided_by_a_quantile() -> Case:
    return Case(model=Scaled("quantile"), loss=nn.CrossEntropyLoss(), batch=vectors())


class Share(nn.Module):
    """Depends on how many rows there are, on none of them in particular."""

    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


@fault("meeting", "unexplained", culprit="Share")
def divided_by_the_number_of_rows() -> Case:
    return Case(model=mlp(Share()), loss=nn.MSELoss(), batch=(torch.randn(8, WIDTH), torch.randn(8, CLASSES)))


class Mixup(nn.Module):
    """Mixes each row with another, chosen at random."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


@fault("meeting", "position", culprit="Mixup")
def rows_mixed_at_random() -> Case:
    return Case(model=mlp(Mixup()), loss=nn.MSELoss(), batch=(torch.randn(8, WIDTH), torch.randn(8, CLASSES)))


@fault("meeting", culprit="Graph")
def neighbours_within_the_batch() -> Case:
    """Each row is smoothed with those that lie near it."""

    class Graph(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (-(x[:, None] - x[None]).square().sum(dim=2)).softmax(dim=1) @ x

    return Case(model=mlp(Graph(), outputs=1), loss=nn.MSELoss(), batch=numbers())
