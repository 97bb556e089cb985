"""The zoo: small models, each named after what it has, with rows and a loss in `ZOO`.

All are smooth: a kink (ReLU) within rounding of 0 turns a rounding error into a wrong gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES, CLASSES, WORDS = 6, 4, 9


KINDS: dict[Any, type[nn.Module]] = {}  # classes, by their forward


def hashed(value: Any) -> Any:
    """Return a value, or its place if it has no hash."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class Made(nn.Module):
    """A model of named parts (modules, parameters; tensors become buffers) whose forward is a function.

    Models with the same forward are of one class, so that repeated ones are seen as blocks.

    Args:
        forward: called with the model and its inputs.
        parts: what the model has, by name."""

    def __new__(cls, forward: Callable[..., Any] | None = None, **parts: Any) -> "Made":
        if forward is None:  # a copy
            return super().__new__(cls)
        key = forward.__code__, *(hashed(cell.cell_contents) for cell in forward.__closure__ or ())
        return super().__new__(KINDS.setdefault(key, type("Made", (cls,), {"forward": forward})))

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


class Perceptron(nn.Module):
    """Two layers along the last axis: (rows, ..., features) to (rows, ..., outputs)."""

    def __init__(self, features: int = FEATURES, outputs: int = CLASSES, *, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def conv_net(channels: int = 3, classes: int = CLASSES, *, width: int = 4) -> nn.Module:
    """Return a model of images: one score per class and pixel."""
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, classes, 1))


def norm(channels: int = 3, classes: int = CLASSES, *, width: int = 4, of: Any = nn.BatchNorm2d) -> Any:
    """Return a model of images in which rows meet: a convolution and BatchNorm, or what `of` makes."""
    body = (nn.Conv2d(channels, width, 3, padding=1), of(width), nn.Tanh())
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def dropout(features: int = FEATURES, outputs: int = CLASSES, *, p: float = 0.5, width: int = 8) -> nn.Module:
    """Return a perceptron whose hidden units are dropped."""
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Dropout(p), nn.Linear(width, outputs))


class Transformer(nn.Module):
    """One block of attention and feed-forward over tokens; padding is seen by no other token.

    Input and output embeddings are one parameter. (rows, length) of int64 to (rows, vocabulary, length).
    """

    def __init__(self, vocabulary: int = WORDS, *, width: int = 8, pad: int = 0) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        query, key, value = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        # Every token sees itself, so that a row of padding alone has something to look at, and no NaN.
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        visible = (tokens != self.pad)[:, None, :] | itself
        hidden = hidden + self.mix(F.scaled_dot_product_attention(query, key, value, attn_mask=visible))
        hidden = hidden + self.feed(self.feed_norm(hidden))
        return F.linear(hidden, self.embedding.weight).transpose(1, 2)


class Block(nn.Module):
    """A residual block worth rebuilding: little comes in, much is kept. (rows, ..., width) to the same."""

    def __init__(self, width: int = FEATURES, *, times: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x).sin())))


def blocks(
    width: int = FEATURES, outputs: int = CLASSES, *, count: int = 3, times: int = 4, dropout: float = 0.0
) -> nn.Module:
    """Return blocks in a `ModuleList`, and a head over the mean of all axes but the first and last."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)

    several = nn.ModuleList([Block(width, times=times, dropout=dropout) for _ in range(count)])
    return Made(forward, blocks=several, head=nn.Linear(width, outputs))


def encoder(
    width: int = 16, outputs: int = CLASSES, *, layers: int = 2, dropout: float = 0.0, words: int = WORDS
) -> nn.Module:
    """Return torch's transformer blocks over an embedding, and a head over the mean of the places."""
    body = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, F.gelu, batch_first=True)
        for _ in range(layers)
    ]
    return Made(
        lambda self, x: self.head(self.blocks(self.words(x)).mean(1)),
        words=nn.Embedding(words, width), head=nn.Linear(width, outputs), blocks=nn.Sequential(*body),
    )  # fmt: skip


def recurrence(
    features: int = FEATURES, outputs: int = CLASSES, *, kind: Any = nn.LSTM, width: int = 8, layers: int = 1
) -> nn.Module:
    """Return a recurrent layer and a head on its last place: (rows, length, features) to (rows, outputs)."""
    body = kind(features, width, num_layers=layers, batch_first=True)
    return Made(lambda self, x: self.head(self.body(x)[0][:, -1]), body=body, head=nn.Linear(width, outputs))


def words(
    inner: nn.Module | None = None, *, width: int = 8, count: int = WORDS, tied: bool = False
) -> nn.Module:
    """Return an embedding, what is between, and scores: (rows, length) of int64 to (rows, words, length)."""
    made = Made(
        lambda self, x: self.head(self.inner(self.embedding(x))).transpose(1, 2),
        embedding=nn.Embedding(count, width), inner=inner or nn.Tanh(),
        head=nn.Linear(width, count, bias=False),
    )  # fmt: skip
    if tied:
        made.head.weight = made.embedding.weight
    return made


def tagger(outputs: int = 3, *, width: int = 4, is_masked: bool = True) -> nn.Module:
    """Return scores for each place, from what is there and the mean of the row's places, padding left out."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        weight = (tokens != 0)[..., None] if is_masked else torch.ones_like(hidden)
        mean = (hidden * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return self.score(hidden + mean.tanh()).transpose(1, 2)

    return Made(forward, words=nn.Embedding(WORDS, width, padding_idx=0), score=nn.Linear(width, outputs))


def router(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return two experts, to one of which each row goes: many a micro-batch leaves one without gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), outputs)
        for expert, rows in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if rows.any():
                out = out.index_put((rows.nonzero().squeeze(1),), expert(x[rows]))
        return out

    return Made(forward, experts=nn.ModuleList(Perceptron(features, outputs) for _ in range(2)))


def own_loss(
    body: nn.Module | None = None, loss: Callable[..., Any] = F.cross_entropy, *, as_dict: bool = True
) -> nn.Module:
    """Return a model that computes its loss where it is given labels: `(x, labels=None)`."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body or Perceptron()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            scores = self.body(x)
            if labels is None:
                return scores
            value = loss(scores, labels)
            return {"loss": value, "logits": scores} if as_dict else value

    return Inside()


def tied(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a model with one parameter under two names, used three times."""
    first = nn.Linear(features, features)
    return Made(
        lambda self, x: self.second(self.again(self.first(self.first(x).tanh()).tanh())),
        first=first, second=nn.Linear(features, outputs), again=first,
    )  # fmt: skip


def shared_memory(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a model whose two gradients are views of one tensor: autograd lets them share its memory."""
    return Made(
        lambda self, x: x @ (self.wide.view(-1) + self.high.view(-1)).view(features, outputs),
        wide=nn.Parameter(torch.randn(outputs, features)), high=nn.Parameter(torch.randn(features, outputs)),
    )  # fmt: skip


def joined(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a model whose gradients are slices of one tensor, and one of them all of it."""
    return Made(
        lambda self, x: x @ (torch.cat([self.left, self.right]) + self.both.view(features, outputs)),
        left=nn.Parameter(torch.randn(1, outputs)), right=nn.Parameter(torch.randn(features - 1, outputs)),
        both=nn.Parameter(torch.randn(features * outputs)),
    )  # fmt: skip


def spread(outputs: int = CLASSES) -> nn.Module:
    """Return one number for all rows and outputs: its gradient is an expanded one."""
    return Made(
        lambda self, x: x[:, :outputs] * self.scale + self.shift,
        scale=nn.Parameter(torch.randn(())), shift=nn.Parameter(torch.randn(1, 1)),
    )  # fmt: skip


def sparse(outputs: int = CLASSES, *, features: int = FEATURES) -> nn.Module:
    """Return a model with an embedding whose gradient holds only the rows that it used."""
    return Made(
        lambda self, x: self.out(self.embedding((x[:, 0] * 100).long() % 5)),
        embedding=nn.Embedding(5, features, sparse=True), out=Perceptron(features, outputs),
    )  # fmt: skip


def frozen(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a model with a frozen layer in the middle."""
    inside = nn.Linear(8, 8).requires_grad_(False)
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), inside, nn.Linear(8, outputs))


def recomputed(features: int = FEATURES, outputs: int = CLASSES, *, reentrant: bool = False) -> nn.Module:
    """Return a model that rebuilds its activations; the reentrant way runs a backward inside the backward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    return Made(
        forward, layers=nn.ModuleList([Perceptron(features, features), Perceptron(features, outputs)])
    )


def counting(body: nn.Module | None = None) -> nn.Module:
    """Return a model with a buffer `seen` that counts rows."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.body(x)

    return Made(forward, body=body or Perceptron(), seen=torch.zeros(()))


class Limited(nn.Module):
    """A model in which memory runs out above `most` rows; `seen` has the rows of each forward."""

    def __init__(self, most: int = 10**9, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.most, self.seen = body or Perceptron(), most, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("injected")
        return self.body(x)


def twins(outputs: int = 1, *, features: int = FEATURES) -> nn.Module:
    """Return one network for several inputs, as ranking and triplet losses need it."""
    return Made(
        lambda self, *inputs: tuple(self.net(x).squeeze(-1) for x in inputs),
        net=Perceptron(features, outputs),
    )


def gaussian(means: int = 1, variances: int = 1, *, features: int = FEATURES) -> nn.Module:
    """Return mean and variance of each output."""
    return Made(
        lambda self, x: (self.mean(x), self.spread(x).exp()),
        mean=Perceptron(features, means), spread=Perceptron(features, variances),
    )  # fmt: skip


def two_heads(classes: int = CLASSES, *, features: int = FEATURES) -> nn.Module:
    """Return scores of classes for each place of a row, and one number for the row."""
    return Made(
        lambda self, x: (self.classes(x), self.value(x).flatten(1).mean(1)),
        classes=Perceptron(features, classes), value=Perceptron(features, 1),
    )  # fmt: skip


def vae(features: int = 8) -> nn.Module:
    """Return a variational autoencoder: `(x, eps)` to reconstruction, mean and logarithm of the variance."""

    def forward(self: Any, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        return self.decode(mean + eps * (0.5 * log_variance).exp()).sigmoid(), mean, log_variance

    return Made(forward, encode=nn.Linear(features, 6), decode=nn.Linear(3, features))


def u_net(channels: int = 3, outputs: int = 1, *, width: int = 4, block: Any = None) -> nn.Module:
    """Return a U-Net of one level: what the first layers make is needed at the end."""

    def double(maps: int, out: int) -> nn.Module:
        layers = (nn.Conv2d(maps, out, 3, padding=1), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1), nn.SiLU())
        return nn.Sequential(*layers)

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        below = self.down(F.max_pool2d(x, 2))
        return self.out(self.join(torch.cat([x, self.up(below)], 1)))

    make = block or double
    return Made(
        forward, first=make(channels, width), down=make(width, 2 * width), join=make(2 * width, width),
        up=nn.ConvTranspose2d(2 * width, width, 2, 2), out=nn.Conv2d(width, outputs, 1),
    )  # fmt: skip


def momentum(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a momentum encoder: its forward writes to parameters that are not trained."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.5).add_(self.query.weight, alpha=0.5)
        return self.query(x) + self.key(x)

    key = nn.Linear(features, outputs).requires_grad_(False)
    return Made(forward, query=nn.Linear(features, outputs), key=key)


def drawing(features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    """Return a model that draws its noise from torch's stream, in forward."""
    return Made(lambda self, x: self.body(x + torch.randn_like(x) / 4), body=Perceptron(features, outputs))


class Kind(NamedTuple):
    """How a kind of model is made, rows for it (a tuple of tensors, targets last), and its loss."""

    make: Callable[[], nn.Module]
    rows: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Any]
    meets: bool = False  # rows meet: it cannot be cut
    draws: bool = False


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def whole(high: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(high, (rows, *shape))


def pair(*columns: Callable[[int], Tensor]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: tuple(column(rows) for column in columns)


VECTORS, NUMBERS = pair(floats(FEATURES), whole(CLASSES)), pair(floats(FEATURES), floats(CLASSES))
IMAGES, PLACES = pair(floats(3, 8, 8), whole(CLASSES)), pair(floats(5, FEATURES), whole(CLASSES))
TEXT = pair(whole(WORDS, 7), whole(WORDS, 7))
cross_entropy, mse = F.cross_entropy, F.mse_loss
ZOO: dict[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(FEATURES, CLASSES), VECTORS, cross_entropy),
    "perceptron": Kind(Perceptron, VECTORS, cross_entropy),
    "convolution": Kind(conv_net, pair(floats(3, 8, 8), whole(CLASSES, 8, 8)), cross_entropy),
    "BatchNorm": Kind(norm, IMAGES, cross_entropy, meets=True),
    "GroupNorm": Kind(lambda: norm(of=lambda width: nn.GroupNorm(2, width)), IMAGES, cross_entropy),
    "BatchNorm in evaluation": Kind(lambda: norm().eval(), IMAGES, cross_entropy),
    "dropout": Kind(dropout, VECTORS, cross_entropy, draws=True),
    "drawing": Kind(drawing, VECTORS, cross_entropy, draws=True),
    "transformer": Kind(Transformer, TEXT, cross_entropy),
    "blocks": Kind(blocks, VECTORS, cross_entropy),
    "encoder": Kind(encoder, pair(whole(WORDS, 7), whole(CLASSES)), cross_entropy),
    "LSTM": Kind(recurrence, PLACES, cross_entropy),
    "GRU": Kind(lambda: recurrence(kind=nn.GRU), PLACES, cross_entropy),
    "words": Kind(words, TEXT, cross_entropy),
    "tied words": Kind(lambda: words(tied=True), TEXT, cross_entropy),
    "tagger": Kind(tagger, pair(lambda rows: torch.randint(1, WORDS, (rows, 7)), whole(3, 7)), cross_entropy),
    "router": Kind(router, NUMBERS, mse),
    "tied": Kind(tied, NUMBERS, mse),
    "shared memory": Kind(shared_memory, NUMBERS, mse),
    "joined": Kind(joined, NUMBERS, mse),
    "spread": Kind(spread, NUMBERS, mse),
    "sparse": Kind(sparse, NUMBERS, mse),
    "frozen": Kind(frozen, NUMBERS, mse),
    "recomputed": Kind(recomputed, NUMBERS, mse),
    "recomputed, reentrant": Kind(lambda: recomputed(reentrant=True), NUMBERS, mse),
    "counting": Kind(counting, VECTORS, cross_entropy),
    "U-Net": Kind(u_net, pair(floats(3, 8, 8), floats(1, 8, 8)), mse),
}
