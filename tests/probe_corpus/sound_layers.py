"""Sound layers and blocks: norms within a row, dropout of every kind, state that nothing reads."""

import random
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from tests.probe_corpus.case import Case, Make, entry
from tests.probe_corpus.data import CLASSES, WIDTH, images, mlp, numbers, vectors

SOUND: list[Make] = []
sound = partial(entry, SOUND)()


def classifier(*middle: nn.Module) -> Case:
    """The layer in the middle of a perceptron."""
    return Case(model=mlp(*middle), loss=nn.CrossEntropyLoss(), batch=vectors())


def convolutional(*middle: nn.Module) -> Case:
    """The layer in the middle of a small convolutional network."""
    layers = nn.Conv2d(2, 4, 3), *middle, nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    return Case(
        model=nn.Sequential(*layers, nn.LazyLinear(CLASSES)), loss=nn.CrossEntropyLoss(), batch=images()
    )


def materialised(case: Case) -> Case:
    """Lazy layers have found their sizes; buffers may have moved, as in a training that goes on."""
    case.model(case.batch[0])
    return case


@sound
def perceptron() -> Case:
    return Case(model=mlp(outputs=1), loss=nn.MSELoss(), batch=numbers())


@sound
def convolutions_with_group_norm() -> Case:
    return materialised(convolutional(nn.GroupNorm(2, 4)))


@sound
def convolutions_with_max_pool() -> Case:
    return materialised(convolutional())


@sound
def instance_norm() -> Case:
    return materialised(convolutional(nn.InstanceNorm2d(4, affine=True)))


@sound
def layer_norm() -> Case:
    return classifier(nn.LayerNorm(6), nn.RMSNorm(6))


@sound
def batch_norm_in_eval() -> Case:
    """The rest trains on, as in fine-tuning."""
    case = materialised(convolutional(nn.BatchNorm2d(4), nn.Dropout(0.2)))
    case.model[1].eval()
    return case


@sound
def dropout() -> Case:
    return classifier(nn.Dropout(0.5))


@sound
def alpha_dropout() -> Case:
    return classifier(nn.SELU(), nn.AlphaDropout(0.3))


@sound
def dropout_of_channels() -> Case:
    return materialised(convolutional(nn.Dropout2d(0.4)))


class DropPath(nn.Module):
    """Leaves the branch of a whole row out (Huang et al. 2016, section 3)."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.branch, self.p = nn.Linear(6, 6), p

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x + self.branch(x)
        kept = x.new_empty(len(x), 1).bernoulli_(1 - self.p)
        return x + self.branch(x) * kept / (1 - self.p)


@sound
def drop_path_by_row() -> Case:
    return classifier(DropPath(), DropPath())


class LayerDrop(nn.Module):
    """Leaves a layer out of the whole micro-batch: one draw, whatever the rows."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.branch, self.p = nn.Linear(6, 6), p

    def forward(self, x: Tensor) -> Tensor:
        return x if self.p and torch.rand(()) < self.p else x + self.branch(x).tanh()


@sound
def layers_dropped_by_one_draw() -> Case:
    return classifier(LayerDrop(), LayerDrop(), LayerDrop())


class PythonLayerDrop(LayerDrop):
    """The same, with Python's own stream."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < self.p else x + self.branch(x).tanh()


@sound
def layers_dropped_by_python() -> Case:
    return classifier(PythonLayerDrop(), PythonLayerDrop(), PythonLayerDrop())


class Choice(nn.Module):
    """Draws from its inputs' distribution (Jang et al. 2017, section 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x, tau=0.5) if self.noise else x.softmax(dim=1)


@sound
def gumbel_softmax() -> Case:
    return classifier(Choice())


class Noise(nn.Module):
    """Adds noise to what passes."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise * torch.randn_like(x)


@sound
def noise_on_inputs_and_inside() -> Case:
    model = nn.Sequential(Noise(0.3), mlp(Noise(0.1)))
    return Case(model=model, loss=nn.CrossEntropyLoss(), batch=vectors())


class Autoencoder(nn.Module):
    """Draws its hidden state (Kingma and Welling 2014, section 2.4)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.noise = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH), 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        hidden = mean + self.noise * spread.exp() * torch.randn(mean.shape, dtype=x.dtype)
        return self.decoder(hidden), mean, spread


@sound
def variational_autoencoder() -> Case:
    def loss(model: nn.Module, micro: dict[str, Tensor]) -> dict[str, ab.Total]:
        x = micro["x"]
        again, mean, spread = model(x)
        distance = (mean.square() + (2 * spread).exp() - 1) / 2 - spread
        return {
            "fit": ab.Total((again - x).square().sum(), x.numel()),
            "prior": ab.Total(distance.sum(), len(x)),
        }

    return Case(
        model=Autoencoder(),
        loss=ab.Terms(loss, coefficients={"prior": 0.2}),
        batch={"x": torch.randn(8, WIDTH)},
    )


class Counted(nn.Module):
    """Counts calls, keeps the last output, and adds up rows, which are the same in every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("total", torch.zeros(6))
        self.rows, self.last = 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.total += x.detach().sum(dim=0)
        self.rows, self.last = self.rows + len(x), x.detach()
        return x


@sound
def counters_that_nothing_reads() -> Case:
    return classifier(Counted())


@sound
def weight_norm_and_spectral_norm_in_eval() -> Case:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)).eval()
    return classifier(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.GELU(), spectral)


@sound
def frozen_layers() -> Case:
    case = classifier(nn.Dropout(0.2), nn.Linear(6, 6))
    case.model[0].requires_grad_(False)
    case.model[3].bias.requires_grad_(False)
    return case


class Narrow(nn.Module):
    """Computes in float32 inside, whatever comes in, as many norms and heads do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + 1e-6)).to(x.dtype)


@sound
def float32_inside() -> Case:
    case = classifier(Narrow())
    return Case(model=case.model, loss=case.loss, batch=case.batch, dtype=torch.float32)


@sound
def bfloat16_parameters() -> Case:
    case = classifier(nn.Dropout(0.1))
    x, y = case.batch
    return Case(model=case.model.bfloat16(), loss=case.loss, batch=(x.bfloat16(), y))


class Recomputed(nn.Module):
    """Keeps no activations; the backward pass runs the block, dropout and all, once more."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)


@sound
def gradient_checkpointing() -> Case:
    return classifier(Recomputed(), Recomputed())


@dataclass(frozen=True)
class Config:
    """Settings as models carry them."""

    name: str = "tiny"
    scale: float = 2.0


@sound
def attributes_that_are_no_tensors() -> Case:
    case = classifier(nn.Tanh())
    case.model.config = Config()
    return case


@sound
def hooks_and_gradients_of_the_users_own() -> Case:
    case = classifier(nn.Linear(6, 6))
    case.model[2].register_forward_hook(lambda module, inputs, output: output.tanh())
    for parameter in case.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return case


@sound
def trained_to_the_end() -> Case:
    """The whole gradient is next to nothing, that of each row is not."""
    x, y = torch.randn(8, WIDTH), torch.randn(8, 1)
    model = nn.Linear(WIDTH, 1)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(8, 1)], dim=1).double(), y.double()).solution
    with torch.no_grad():
        model.weight.copy_(solution[:-1].T)
        model.bias.copy_(solution[-1])
    return Case(model=model, loss=nn.MSELoss(), batch=(x, y))


class Experts(nn.Module):
    """Each row goes to one expert, and there is room for all: an expert sees any number of rows, or none."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(p)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(dim=1)
        out = x
        for index, expert in enumerate(self.experts):
            sent = (shares.argmax(dim=1) == index).nonzero()[:, 0]
            out = out.index_add(0, sent, expert(x[sent]) * shares[sent, index, None])
        return out


@sound
def experts_with_room_for_all() -> Case:
    return classifier(Experts(0.0))


@sound
def experts_with_dropout() -> Case:
    """What an expert draws has as many lines as rows were sent to it."""
    return classifier(Experts(0.3))


class Shared(nn.Module):
    """One layer called three times, one never, the branches kept in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 2)})

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        x = self.layer(self.layer(left).tanh()) + self.layer(right)
        return {name: head(F.dropout(x, 0.1, self.training)) for name, head in self.heads.items()}


@sound
def many_inputs_and_outputs() -> Case:
    def loss(model: nn.Module, micro: dict[str, dict[str, Tensor]]) -> dict[str, ab.Total]:
        out = model(**micro["inputs"])
        return {
            name: ab.Total(F.huber_loss(out[name], y, reduction="sum"), y.numel())
            for name, y in micro["targets"].items()
        }

    batch = {
        "inputs": {"left": torch.randn(8, WIDTH), "right": torch.randn(8, WIDTH)},
        "targets": {"a": torch.randn(8, 1), "b": torch.randn(8, 2)},
    }
    return Case(model=Shared().eval(), loss=loss, batch=batch)
