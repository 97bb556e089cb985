"""Deep Gradient Compression on LeNet-5 beside dense gradients: accuracy, bytes, and the effect of each part.

By hand: python -m benchmarks.compression --data FOLDER [--epochs N] [--seeds N]. Two ranks in one process,
without a group: each has half of the rows of every batch. The exit code is 0 only if all thresholds hold.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from anybatch.data import Dataset, load
from anybatch.parallel import DeepGradientCompression
from benchmarks.memory_report import Raw, Record, Study
from benchmarks.models import LeNet5
from benchmarks.report import table
from benchmarks.thresholds import Verdict

RANKS, ROWS, LR, MOMENTUM, CLIP, WARMUP = 2, 64, 0.02, 0.9, 2.0, 4  # ROWS of a batch, WARMUP in epochs
TRAIN_ROWS = 12_000
POINTS, RATIO, WORST = 0.5, 1 / 100, 3.0  # of accuracy; bytes sent of dense ones; test error in percent
DENSE, DGC = "dense", "DGC, 99.9 %"
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    DENSE: None,
    DGC: {},
    "without momentum correction": {"momentum": 0.0},
    "without local clipping": {"clip_norm": None},
    "without momentum factor masking": {"masking": False},
    "without warm-up": {"warmup_updates": 0},
}


def train(way: str, rows: Dataset, test: Dataset, *, epochs: int, seed: int) -> Record:
    """One training; weights and the order of the rows come from the seed alone."""
    order = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LeNet5()
    like, each, options = dict(model.named_parameters()), -(-len(rows) // ROWS), WAYS[way]
    usual = {"momentum": MOMENTUM, "clip_norm": CLIP, "ranks": RANKS, "warmup_updates": WARMUP * each}
    codecs = [DeepGradientCompression(**usual | options) for _ in range(RANKS)] if options is not None else []
    own = codecs[0].momentum if codecs else 0.0  # where the codec has none, it is the optimizer's
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.0 if own else MOMENTUM)
    decay = LambdaLR(optimizer, lambda update: 1 - update / (each * epochs))
    accuracy, sent, start = list[float](), list[int](), time.process_time()
    for _ in range(epochs):
        for batch in torch.randperm(len(rows), generator=order).split(ROWS):
            parts = [(rows.inputs[part], rows.targets[part]) for part in batch.chunk(RANKS)]
            shares = [share(model, like, *part, len(batch)) for part in parts]
            payloads = [codec.encode(one, like) for codec, one in zip(codecs, shares, strict=False)]
            sums = (
                codecs[0].decode(payloads, like) if codecs else {n: sum(s[n] for s in shares) for n in like}
            )
            for name, parameter in like.items():
                parameter.grad = sums[name]
            optimizer.step()
            decay.step()
            sent.append(max((codec.sent for codec in codecs), default=sum(p.nbytes for p in like.values())))
        accuracy.append(tested(model, test))
    print(f"{way}, seed {seed}: {accuracy[-1]:.2%}, {sent[-1]:,} bytes", flush=True)
    record = {"way": way, "seed": seed, "accuracy": accuracy, "sent": sent[-1], "all": sum(sent)}
    told = {"rows": len(rows), "tests": len(test), "data": rows.name}
    return record | told | {"seconds": time.process_time() - start}


def share(model: nn.Module, like: Mapping[str, Tensor], x: Tensor, y: Tensor, rows: int) -> dict[str, Tensor]:
    """A rank's part of the gradient of the mean over the rows of all ranks."""
    loss = F.cross_entropy(model(x), y, reduction="sum") / rows
    return dict(zip(like, torch.autograd.grad(loss, [*like.values()]), strict=True))


@torch.no_grad()
def tested(model: nn.Module, rows: Dataset) -> float:
    """The share of rows that the model tells right."""
    parts = zip(rows.inputs.split(500), rows.targets.split(500), strict=True)
    return sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in parts) / len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """All ways from all seeds; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--data", default="digits", help="folder with MNIST in IDX form; digits without it")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), options.folder, keep=False)
    torch.set_num_threads(1)
    split, some = load(options.data), slice(TRAIN_ROWS)
    rows = replace(split.train, inputs=split.train.inputs[some], targets=split.train.targets[some])
    runs = [(way, seed) for seed in range(options.seeds) for way in WAYS]
    records = [train(way, rows, split.test, epochs=options.epochs, seed=seed) for way, seed in runs]
    return STUDY.finish(STUDY.collected(records, config="lenet5"), options.folder)


# ---- judgement and report


def accuracy(records: Sequence[Record], way: str, epoch: int = -1) -> float:
    """After an epoch, in percent; the mean over the seeds."""
    return statistics.mean(100 * one["accuracy"][epoch] for one in records if one["way"] == way)


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """Dense gradients learn, and so do compressed ones, with few bytes."""
    dense, dgc = (next(one for one in records if one["way"] == way) for way in (DENSE, DGC))
    lost, ratio = accuracy(records, DENSE) - accuracy(records, DGC), dgc["sent"] / dense["sent"]
    yield Verdict(what="dense: test error in percent", measured=100 - accuracy(records, DENSE), limit=WORST)
    yield Verdict(what="DGC: points of accuracy below dense", measured=lost, limit=POINTS)
    yield Verdict(what="DGC: bytes after warm-up over dense bytes", measured=ratio, limit=RATIO)


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each way, and what was done."""
    first, lines, epochs = records[0], list[tuple[str, ...]](), len(records[0]["accuracy"])
    after = min(WARMUP, epochs - 1)
    for way in WAYS:
        own = [one for one in records if one["way"] == way]
        fewer = f"{first['sent'] / own[0]['sent']:.0f} x", f"{first['all'] / own[0]['all']:.1f} x"
        cells = [f"{one['accuracy'][-1]:.2%}" for one in own]
        cells += [f"{accuracy(records, way) - accuracy(records, DENSE):+.2f}"]
        lines.append((way, *cells, f"{accuracy(records, way, after):.2f}%", f"{own[0]['sent']:,}", *fewer))
    seeds = sorted({f"seed {one['seed']}" for one in records})
    header = ("gradients", *seeds, "from dense", f"epoch {after + 1}", "bytes", "fewer", "fewer in all")
    yield from ("", f"## LeNet-5, {first['data']}, {RANKS} ranks", "", *table(header, lines), "")
    yield f"Accuracy on {first['tests']:,} test rows, {epochs} epochs of the first {first['rows']:,} rows."
    yield f"From dense: difference of the means, points. Epoch {after + 1}: mean one epoch after the warm-up."
    yield "Bytes: what a rank sends for the last update. Fewer: than in float32, for that update and in all."
    yield f"Batches of {ROWS} rows, SGD, learning rate {LR:g} falling to 0 on a line, momentum {MOMENTUM:g};"
    yield f"clip_norm={CLIP:g}, {WARMUP} epochs of warm-up. Without momentum correction the optimizer has it."
    yield f"The whole study took {sum(one['seconds'] for one in records):,.0f} s of one core."


TITLE = "Deep Gradient Compression: accuracy, bytes, and what each part does"
STUDY = Study(kind="compression", title=TITLE, judge=judge, sections=sections, packages=())

if __name__ == "__main__":
    sys.exit(main())
