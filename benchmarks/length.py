"""Rows of uneven length: order="length" beside the padded loop written by hand, in time, peak and gradient.

By hand: python -m benchmarks.length [--rounds N] [--peers]. Small models of transformers, 64 rows, a
quarter of the tokens real. --peers adds accelerate, transformers' Trainer and Lightning, for information.
The exit code is 0 only if the thresholds hold.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import transformers
from torch import Tensor, nn

import anybatch as ab
from anybatch.memory.meter import Meter
from anybatch.testing import GradientRecorder, relative_error
from benchmarks.length_peers import PEERS, samples_of
from benchmarks.machine import hardware
from benchmarks.race import quiet_collector

ROWS, WORDS, MEAN, SPREAD = 64, 1000, 40, 0.7  # rows; tokens; mean length, deviation of its logarithm
TIME, PEAK, ERROR = 0.45, 0.55, 1e-4  # of the padded loop at 16 rows; relative, in float32
SIZES = {"vocab_size": WORDS, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 256, "max_position_embeddings": 1024, "pad_token_id": 0}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **NO_DROPOUT)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
}
Batch = dict[str, Tensor]
Update = Callable[[Batch], object]


def make_batch(name: str, seed: int) -> Batch:
    """Log-normal lengths, none above four times the mean, filled up to the longest."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(ROWS, generator=draw) * SPREAD - SPREAD**2 / 2
    lengths = (MEAN * normal.exp()).round().clamp(4, 4 * MEAN)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.randint(1, WORDS, mask.shape, generator=draw) * mask
    kept = mask if name == "llama" else mask & (torch.rand(mask.shape, generator=draw) < 0.15)
    return {
        "input_ids": tokens,
        "attention_mask": mask.long(),
        "labels": tokens.where(kept, -100),
    }


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Update:
    """Micro-batches as long as the batch; means are weighted by their labels, so that the loop is exact."""
    is_shifted = isinstance(model, transformers.LlamaForCausalLM)

    def update(batch: Batch) -> None:
        targets = batch["labels"][:, 1:] if is_shifted else batch["labels"]
        valid = (targets != -100).sum(1)
        for start in range(0, ROWS, size):
            rows = slice(start, start + size)
            loss = model(**{key: value[rows] for key, value in batch.items()}).loss
            (loss * (valid[rows].sum() / valid.sum())).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_length(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> Update:
    """Ours."""
    return ab.Step(model, ab.ModelLoss(), optimizer, micro_batch=size, options=ab.Options(order="length"))


CONTESTANTS = {
    "hand 16": (by_hand, 16),
    "hand 8": (by_hand, 8),
    "length 16": (by_length, 16),
    "length 8": (by_length, 8),
}


def peak(model: nn.Module, make: Callable[..., Update], size: int, batch: Batch) -> int:
    """Bytes of tensors beyond those that are there before, in a step that is not the first."""
    optimizer = torch.optim.AdamW(model.parameters())
    update = make(model, optimizer, size)
    for _ in range(3):
        update(batch)
    with quiet_collector(), Meter(model, [optimizer], batch_leaves=[*batch.values()]) as meter:
        update(batch)
    return meter.peak - meter.held


def gradient(model: nn.Module, make: Callable[..., Update], size: int, batch: Batch) -> dict[str, Tensor]:
    """What the optimizer is given."""
    recorder = GradientRecorder(model)
    make(model, recorder, size)(batch)
    return recorder.gradients


def beside_peers(name: str, model: nn.Module, rounds: int) -> None:
    """Seconds of an update of all others, as a share of the padded loop's at 16 rows in the same round."""
    batches = [make_batch(name, seed) for seed in range(6)]
    shares: dict[str, list[float]] = {key: [] for key in PEERS}
    for _ in range(rounds):
        own = copy.deepcopy(model)
        update, seconds = by_hand(own, torch.optim.AdamW(own.parameters()), 16), list[float]()
        for batch in batches:
            began = time.process_time()
            update(batch)
            seconds.append(time.process_time() - began)
        padded = statistics.mean(seconds[1:])
        for key, run in PEERS.items():
            with suppress(ImportError):
                took = run(copy.deepcopy(model), samples_of(batches), ROWS, 16)
                shares[key].append(statistics.mean(took[-4:]) / padded)
    for key, found in shares.items():
        said = f"{statistics.median(found):5.2f} of the time" if found else "not installed"
        print(f"  {key:10} {said}, at 16 rows, each micro-batch padded to its longest row")


def measure(name: str, rounds: int, peers: bool) -> bool:
    """One model: the table, and whether the thresholds hold."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    batches = [make_batch(name, seed) for seed in range(3)]
    real = [one["attention_mask"].float().mean().item() for one in batches]
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, "
          f"{ROWS} x {[one['labels'].shape[1] for one in batches]} tokens, "
          f"{statistics.mean(real):.0%} of them real")  # fmt: skip
    grown = {key: peak(copy.deepcopy(model), *one, batches[0]) for key, one in CONTESTANTS.items()}
    found = {key: gradient(copy.deepcopy(model), *one, batches[0]) for key, one in CONTESTANTS.items()}
    error = {key: relative_error(one, found["hand 16"]) for key, one in found.items()}
    updates: dict[str, Update] = {}
    for key, (make, size) in CONTESTANTS.items():
        own = copy.deepcopy(model)
        updates[key] = make(own, torch.optim.AdamW(own.parameters()), size)
    seconds: dict[str, list[float]] = {key: [] for key in updates}
    for turn in range(2 + rounds):  # the first two warm up; ours compares padded with trimmed rows
        order = [*updates] if turn % 2 else [*updates][::-1]
        for key in order:
            began = time.process_time()
            updates[key](batches[turn % len(batches)])
            seconds[key].append(time.process_time() - began)
    first = seconds["length 8"][0] / statistics.median(seconds["hand 16"][2:])
    holds = True
    for key in updates:
        pairs = zip(seconds[key][2:], seconds["hand 16"][2:], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        share = grown[key] / grown["hand 16"]
        print(f"  {key:10} {statistics.median(seconds[key][2:]):7.3f} s   {ratio:5.2f} of the time   "
              f"{share:5.2f} of the peak   gradient {error[key]:.1e}")  # fmt: skip
        holds &= key != "length 8" or (ratio <= TIME and share <= PEAK)
        holds &= error[key] <= ERROR
    print(f"  the first step by length, with the comparison: {first:.2f} of a padded step")
    if peers:
        beside_peers(name, model, rounds)
    return holds


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(hardware())
    sys.exit(0 if all(list(map(partial(measure, **vars(options)), MODELS))) else 1)


if __name__ == "__main__":
    main()
