"""Faults in models: what a row gets depends on its place, on earlier calls, or it gets nothing at all."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import CLASSES, WIDTH, mlp, numbers, vectors

FAULTS: list[Make] = []
fault = partial(entry, FAULTS)


def classifier(*middle: nn.Module) -> Case:
    """The faulty layer in the middle of a perceptron."""
    return Case(model=mlp(*middle), loss=nn.CrossEntropyLoss(), batch=vectors())


# ---- by position


class OwnDropout(nn.Module):
    """Draws the same mask in every call, row by row from the top."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(7)
        return x * 2 * (torch.rand(x.shape, generator=self.generator) > 0.5)


@fault("position", culprit="OwnDropout")
def dropout_from_a_seed_of_its_own() -> Case:
    return classifier(OwnDropout())


class FreshGenerator(nn.Module):
    """The same, with a new generator for each call."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        return x + 0.5 * noise


@fault("position", culprit="FreshGenerator")
def noise_from_a_seed_of_its_own() -> Case:
    return classifier(FreshGenerator())


class MaskTable(nn.Module):
    """A dropout mask drawn once, one line for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(32, 6) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask[: len(x)]


@fault("position", culprit="MaskTable")
def mask_by_place_in_the_batch() -> Case:
    return classifier(MaskTable())


class Reseeded(nn.Module):
    """For the sake of reproducibility."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x, 0.5, training=True)


@fault("position", culprit="Reseeded")
def global_seed_set_in_forward() -> Case:
    return classifier(Reseeded())


class Place(nn.Module):
    """A learned vector for each place in the batch: meant for the places of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(len(x), device=x.device))


@fault("position", culprit="Place")
def embedding_of_the_row_number() -> Case:
    return classifier(Place())


class Flip(nn.Module):
    """Augments every other row."""

    def forward(self, x: Tensor) -> Tensor:
        sign = 1 - 2 * (torch.arange(len(x), device=x.device) % 2)
        return x * sign[:, None]


@fault("position", culprit="Flip")
def every_other_row_flipped() -> Case:
    return classifier(Flip())


@fault("position", "meeting", "unexplained", culprit="Sorted")
def rows_sorted_and_never_put_back() -> Case:
    """As one does for packing; the labels stay where they were."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x[x[:, 0].argsort(descending=True)])

    return Case(model=Sorted(), loss=nn.CrossEntropyLoss(), batch=vectors())


# ---- state


class WarmUp(nn.Module):
    """A buffer counts the calls and scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (self.calls / 10).clamp(max=1)


@fault("state", culprit="WarmUp")
def scaled_by_a_counter_in_a_buffer() -> Case:
    return classifier(WarmUp())


class Annealed(nn.Module):
    """The same with a plain Python number, which no state dict knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


@fault("state", culprit="Annealed")
def scaled_by_a_counter_in_python() -> Case:
    return classifier(Annealed())


class RunningCentre(nn.Module):
    """Subtracts a running mean that it has just moved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
        return x - self.mean


@fault("state", "meeting", culprit="RunningCentre")
def running_mean_subtracted() -> Case:
    return classifier(RunningCentre())


class Carried(nn.Module):
    """Goes on from where the last call ended, as a stateful recurrent network does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory[-1] if self.memory else torch.zeros_like(x[0])
        out = torch.tanh(self.cell(x) + before)
        self.memory.append(out.detach().mean(dim=0))
        return out


@fault("state", culprit="Carried")
def memory_of_the_last_call() -> Case:
    return classifier(Carried())


class Queue(nn.Module):
    """Keys of earlier calls are the negatives of this one (He et al. 2020, section 3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 6)
        self.register_buffer("keys", F.normalize(torch.randn(16, 6)))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.encoder(x))
        logits = query @ self.keys.clone().T / 0.2
        self.keys = torch.cat([query.detach(), self.keys])[:16]
        return logits


@fault("state", culprit="Queue")
def queue_of_negatives() -> Case:
    return Case(
        model=Queue(), loss=nn.CrossEntropyLoss(), batch=(torch.randn(8, WIDTH), torch.randint(16, (8,)))
    )


@fault("state", culprit="pectral|parametriz|Linear")
def spectral_norm_in_training() -> Case:
    """One power iteration for each call in training mode, on a weight that has just been updated."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    nn.init.normal_(layer.parametrizations.weight.original)
    return classifier(layer, nn.Tanh())


# ---- state that only the buffers show


class Counted(nn.Module):
    """Counts its calls; nothing reads the count but the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


@fault("buffer", culprit="num_calls")
def calls_counted_in_a_saved_buffer() -> Case:
    return classifier(Counted())


class Average(nn.Module):
    """Keeps a running mean of what passes, for later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x


@fault("buffer", culprit="mean")
def running_mean_kept_for_later() -> Case:
    return classifier(Average())


@fault("buffer", culprit="running_mean.*running_var")
def running_statistics_of_instance_norm() -> Case:
    """In training nothing reads them; `eval()` does."""
    norm = nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    return classifier(norm)


# ---- without gradient, without output


class HalfDetached(nn.Module):
    """Trains on the second half of its rows only: one forgot that both halves are fresh."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        return torch.cat([x[:half].detach(), x[half:]])


@fault("detached", culprit="HalfDetached")
def first_half_detached() -> Case:
    return classifier(HalfDetached(), nn.Linear(6, 6), nn.Tanh())


class TopOnly(nn.Module):
    """Lets gradient through for the row with the largest activation."""

    def forward(self, x: Tensor) -> Tensor:
        top = x.detach().sum(dim=1).argmax()
        chosen = (torch.arange(len(x), device=x.device) == top)[:, None]
        return torch.where(chosen, x, x.detach())


@fault("detached", "meeting", culprit="TopOnly")
def gradient_for_one_row_only() -> Case:
    return classifier(TopOnly())


class Balanced(torch.autograd.Function):
    """The identity, whose gradient is divided by its size over all rows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient / (gradient.norm() + 1e-8)


class GradientNorm(nn.Module):
    """Rows meet in the backward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        return Balanced.apply(x)


@fault("detached", "meeting", "unexplained", culprit="GradientNorm")
def gradient_normalised_over_the_rows() -> Case:
    return classifier(GradientNorm())


class Pairs(nn.Module):
    """Works on pairs of rows and drops the one that is left over."""

    def forward(self, x: Tensor) -> Tensor:
        return x[: len(x) // 2 * 2]


@fault("dropped rows", culprit="Pairs")
def odd_row_dropped_by_the_model() -> Case:
    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
        out = model(micro[0])
        losses = F.mse_loss(out, micro[1][: len(out)], reduction="none")
        return ab.Total(losses.sum(), losses.numel())

    return Case(model=mlp(Pairs(), outputs=1), loss=loss, batch=numbers())


@fault("dropped rows", "meeting", culprit="Confident")
def rows_filtered_by_the_batch() -> Case:
    """Keeps the rows that are above the average of their batch."""

    class Confident(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(outputs=CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.body(x)
            kept = logits.detach().amax(dim=1) >= logits.detach().amax(dim=1).mean()
            return logits[kept], kept

    def loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
        logits, kept = model(micro[0])
        return ab.Total(F.cross_entropy(logits, micro[1][kept], reduction="sum"), len(logits))

    return Case(model=Confident(), loss=loss, batch=vectors())
