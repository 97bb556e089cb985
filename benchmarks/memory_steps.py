"""`python -m benchmarks.memory_steps`: steps within a budget, beside plain steps and the best cut by hand."""

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.optim import AdamW

import anybatch as ab
from benchmarks.memory_report import Raw, Record, Study, broken, child, sound, write_lines
from benchmarks.report import table
from benchmarks.thresholds import Verdict

MODULE = "benchmarks.memory_steps"
STEPS = 15  # the first and the 14 that are held against the budget
ROUNDS = 10  # interleaved, when all is settled
FINALISTS = 3  # cuts by hand in those rounds
WORDS = 1000
LENGTHS = tuple(27 + (37 * i) % 95 for i in range(30))  # 27 to 121, each once
LENGTHS_ROUNDS = 2
FIRST, FIRST_OF_FEW = 3.0, 3.5  # plain steps; where only cuts of one or two rows fit
SETTLED, ALL_LENGTHS = 1.05, 1.10  # of the best cut by hand within the same bytes
NAMED = 0.10  # what the budget that a refusal names may be off by
OVER = 0.03, 4 * 2**20  # over the budget, share or bytes, the larger
OVER_FIRST = 0.10, 16 * 2**20

Batch = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batches.

    Attributes:
        build: makes the model.
        batch: makes a batch of so many rows of a length.
        loss: as anybatch takes it.
        plain_loss: the same by hand, the mean of a part.
        weight: what that mean is divided by.
        size: rows, and their length where it may vary.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[], Any] = ab.ModelLoss
    plain_loss: Callable[[nn.Module, Batch], Tensor] = lambda model, part: model(**part).loss
    weight: Callable[[Batch], float] = lambda part: float((part["labels"] != -100).sum())
    size: tuple[int, int] = (32, 96)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=256, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _bert_batch(rows: int, length: int) -> Batch:
    ids = tokens(rows, length)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    return {"input_ids": ids.masked_fill(hidden, 1), "labels": ids.masked_fill(~hidden, -100)}


def _convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 4, 2],
        image_size=64,
    )
    config.num_labels = 10
    return transformers.ConvNextForImageClassification(config)


def _convnext_batch(rows: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(10, (rows,))}


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=100,
        max_target_positions=64, num_mel_bins=40, dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _whisper_batch(rows: int, length: int) -> Batch:
    return {"input_features": torch.randn(rows, 40, 200), "labels": tokens(rows, 32)}


class UNet3d(nn.Module):
    """Two levels, a skip connection, group normalization."""

    def __init__(self, maps: int = 8) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, maps, 3, padding=1), nn.GroupNorm(2, maps), nn.ReLU())
        self.deep = nn.Sequential(
            nn.Conv3d(maps, 2 * maps, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * maps), nn.ReLU(),
            nn.Conv3d(2 * maps, 2 * maps, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.ConvTranspose3d(2 * maps, maps, 2, stride=2)
        self.head = nn.Sequential(nn.Conv3d(2 * maps, maps, 3, padding=1), nn.ReLU(), nn.Conv3d(maps, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.head(torch.cat([high, self.up(self.deep(high))], 1))


CASES: Mapping[str, Case] = {
    "llama": Case(
        build=_llama,
        batch=lambda rows, length: {"input_ids": (ids := tokens(rows, length)), "labels": ids.clone()},
        weight=lambda part: part["labels"][:, 1:].numel(),
    ),
    "bert": Case(build=_bert, batch=_bert_batch),
    "convnext": Case(build=_convnext, batch=_convnext_batch, weight=lambda part: len(part["labels"])),
    "whisper": Case(build=_whisper, batch=_whisper_batch),
    "unet3d": Case(
        build=UNet3d,
        batch=lambda rows, length: (torch.randn(rows, 1, 24, 24, 24), torch.randn(rows, 1, 24, 24, 24)),
        loss=nn.MSELoss,
        plain_loss=lambda model, part: F.mse_loss(model(part[0]), part[1]),
        weight=lambda part: len(part[0]),
        size=(8, 0),
    ),
}


class Training:
    """A model in training, each step with its CPU seconds and its heap.

    The heap of a step: the tensors that are there when it begins, and what malloc gives out in it on top.
    """

    def __init__(self, case: Case, **asked: Any) -> None:
        self.case = case
        torch.manual_seed(0)
        self.model = self.case.build().train()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        self._step: Any = None  # by hand, unless something is asked of a step
        if asked:
            self._step = ab.Step(self.model, self.case.loss(), self.optimizer, **asked)
        self.cut: tuple[int, ...] = ()

    def step(self, batch: Batch, size: int = 0) -> tuple[float, int]:
        """One update, with micro-batches of `size` by hand; seconds and bytes."""
        held, before = self.held(batch), _heap("now")
        HEAP.heap_reset()
        began = time.process_time()
        if self._step is None:
            self._by_hand(batch, size)
        else:
            self.cut = self._step(batch).cut
        return time.process_time() - began, held + _heap("peak") - before

    def _by_hand(self, batch: Batch, size: int) -> None:
        total = self.case.weight(batch)
        for start in range(0, len(_leaves(batch)[0]), size):
            part = _part(batch, start, start + size)
            (self.case.plain_loss(self.model, part) * (self.case.weight(part) / total)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self, batch: Batch) -> int:
        """Bytes of parameters, buffers, gradients, optimizer state and batch."""
        state = [one for slots in self.optimizer.state.values() for one in slots.values()]
        found = [*self.model.parameters(), *self.model.buffers(), *state, *_leaves(batch)]
        found += [one.grad for one in self.model.parameters()]
        storages = [one.untyped_storage() for one in found if isinstance(one, Tensor)]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@contextmanager
def counted() -> Generator[Mapping[str, str]]:
    """The environment of children whose heap is counted."""
    with tempfile.TemporaryDirectory() as temporary:
        library = Path(temporary) / "heap.so"
        source = Path(__file__).with_name("heap.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        yield os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


HEAP: Any = ctypes.CDLL(None)  # of a child, which runs with `heap.c` before the C library


def _heap(what: str) -> int:
    function = getattr(HEAP, f"heap_{what}")
    function.restype = ctypes.c_long
    return int(function())


def _leaves(batch: Batch) -> list[Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def _part(batch: Batch, start: int, stop: int) -> Batch:
    if isinstance(batch, dict):
        return {name: leaf[start:stop] for name, leaf in batch.items()}
    return tuple(leaf[start:stop] for leaf in batch)


def _batch(name: str, length: int | None = None) -> Batch:
    rows, own = CASES[name].size
    torch.manual_seed(1)
    return CASES[name].batch(rows, own if length is None else length)


def _even(rows: int) -> list[int]:
    """Sizes of micro-batches that divide the rows evenly, largest first."""
    return sorted({-(-rows // parts) for parts in range(1, rows + 1)}, reverse=True)


def measure(name: str, share: str) -> Iterator[Record]:
    """One model under one budget, warm: plain steps, ours, then ours and cuts by hand in turn."""
    batch, rows = _batch(name), CASES[name].size[0]
    plain = Training(CASES[name])
    plain.step(batch, rows)  # makes the optimizer's state
    by_hand = {size: [plain.step(batch, size) for _ in range(2)] for size in _even(rows)}
    heaps = {size: runs[-1][1] for size, runs in by_hand.items()}
    whole_s = min(seconds for seconds, _ in by_hand[rows])
    del plain
    gc.collect()
    budget = None if share == "auto" else int(float(share) / 100 * heaps[rows])
    record: dict[str, Any] = {"model": name, "share": share, "budget": budget, "plain_s": whole_s}
    record |= {"plain_heap": heaps[rows], "least_heap": min(heaps.values())}
    ours = Training(CASES[name], memory=share if budget is None else budget)
    try:
        runs = [ours.step(batch) for _ in range(STEPS)]
    except ab.BudgetError as error:
        yield record | {"refused": str(error).splitlines()[0], "named": error.smallest}
        return
    record |= {"first_s": runs[0][0], "first_heap": runs[0][1], "heap": max(heap for _, heap in runs[1:])}
    record |= {"cut": max(ours.cut, default=rows), "steps_s": [seconds for seconds, _ in runs]}
    fitting = [size for size, heap in heaps.items() if budget is None or heap <= budget]
    fitting.sort(key=lambda size: min(seconds for seconds, _ in by_hand[size]))
    yield record | _settled(name, batch, ours, fitting[:FINALISTS])


def _settled(name: str, batch: Batch, ours: Training, sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds of our steps beside cuts by hand: the median of pairs, with the fastest cut."""
    plain = Training(CASES[name])
    pairs: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for turn in range(ROUNDS):
        for size, found in pairs.items():
            both = [(ours, 0), (plain, size)][:: 1 if turn % 2 else -1]
            took = {by: training.step(batch, by)[0] for training, by in both}
            found.append((took[0], took[size]))
    ratios = {size: statistics.median(one / other for one, other in found) for size, found in pairs.items()}
    best = max(ratios, key=ratios.__getitem__, default=0)
    if not best:
        return {"settled_s": None, "best": 0, "best_s": None}
    by_hand = statistics.median(other for _, other in pairs[best])
    return {"settled_s": ratios[best] * by_hand, "best": best, "best_s": by_hand}


def measure_lengths(share: str, size: int) -> Iterator[Record]:
    """Batches of 30 lengths, cold: by hand at `size`, or ours within a share of the plain peak (size 0)."""
    asked = {} if size else {"memory": share if share == "auto" else int(share)}
    training = Training(CASES["llama"], **asked)
    batches = [_batch("llama", length) for length in LENGTHS]
    runs = [training.step(batch, size) for batch in batches]
    heap = max(heap for _, heap in runs[1:])
    yield {
        "model": "lengths",
        "size": size,
        "seconds": sum(s for s, _ in runs),
        "heap": heap,
        "budget": share,
    }


def _lengths(shares: Sequence[str], environment: Mapping[str, str]) -> Iterator[Record]:
    """Everybody in turn; the least of the rounds."""
    rows = CASES["llama"].size[0]

    def least(budget: str, size: int) -> Record:
        found = [_child(f"lengths:{budget}:{size}", environment) for _ in range(LENGTHS_ROUNDS)]
        return next(
            (one for one in found if "error" in one), min(found, key=lambda one: one.get("seconds", 0))
        )

    by_hand = [least("none", size) for size in (rows, rows // 2, rows // 4, rows // 8)]
    yield from (record for record in by_hand if "error" in record)
    whole = next((one["heap"] for one in sound(by_hand)), 0)
    for share in shares:
        budget = share if share == "auto" else str(int(float(share) / 100 * whole))
        ours = least(budget, 0)
        if "error" in ours:
            yield ours
            continue
        limit = float("inf") if share == "auto" else int(budget)
        best = min(
            (one for one in sound(by_hand) if one["heap"] <= limit),
            key=lambda one: one["seconds"],
            default=None,
        )
        yield {**ours, "share": share, "best": best and best["size"], "best_s": best and best["seconds"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Each case in a process of its own; returns the exit code."""
    parser = STUDY.parser()
    parser.add_argument("--models", nargs="*", default=[*CASES], choices=[*CASES], help="which models")
    parser.add_argument("--shares", nargs="*", default=["75", "50", "30", "auto"], help="percent, or auto")
    parser.add_argument("--lengths", action="store_true", help="batches of 30 lengths instead")
    parser.add_argument("--save", action="store_true", help="keep table and JSON in benchmarks/results")
    options = parser.parse_args(arguments)
    if options.child:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        name, share, *size = options.child.split(":")
        write_lines(measure_lengths(share, int(size[0])) if size else measure(name, share), options.out)
        return 0
    folder = Path("benchmarks/results") if options.save else options.folder
    if options.raw:
        return STUDY.finish(Raw.load(options.raw), folder, keep=False)
    with counted() as environment:
        if options.lengths:
            records = list(_lengths(options.shares, environment))
        else:
            cases = [f"{name}:{share}" for name in options.models for share in options.shares]
            records = [_child(case, environment) for case in cases]
    return STUDY.finish(STUDY.collected(records, config="lengths" if options.lengths else "shapes"), folder)


def _child(case: str, environment: Mapping[str, str]) -> Record:
    record = child(MODULE, ["--child", case], environment=environment)[-1]
    print(case, {name: value for name, value in record.items() if name != "steps_s"}, flush=True)
    return record


def _judge(records: Sequence[Record]) -> Iterator[Verdict]:
    yield from broken(records)
    for record in sound(records):
        what, budget = f"{record['model']} {record['share']}", record["budget"]
        if "refused" in record:
            off = abs(record["named"] / record["least_heap"] - 1)
            yield Verdict(what=f"{what}: budget that the refusal names", measured=off, limit=NAMED)
            continue
        if "first_s" in record:
            first = record["first_s"] / record["plain_s"]
            limit = FIRST_OF_FEW if record["cut"] <= 2 else FIRST
            yield Verdict(what=f"{what}: first step in plain steps", measured=first, limit=limit)
        if record["best_s"]:
            took = record.get("settled_s") or record["seconds"]
            limit = ALL_LENGTHS if record["model"] == "lengths" else SETTLED
            yield Verdict(
                what=f"{what}: seconds of the best by hand", measured=took / record["best_s"], limit=limit
            )
        for name, (share, least) in (("first_heap", OVER_FIRST), ("heap", OVER)):
            if name in record and budget not in (None, "auto"):
                limit = 1 + max(share, least / int(budget))
                yield Verdict(
                    what=f"{what}: {name} of the budget", measured=record[name] / int(budget), limit=limit
                )


def _sections(records: Sequence[Record]) -> Iterator[str]:
    header = (
        "case",
        "first / plain",
        "heap / budget: first",
        "later",
        "cut",
        "best by hand",
        "seconds / best",
    )

    def row(one: Record) -> Sequence[str]:
        case = f"{one['model']} {one['share']}"
        if "refused" in one:
            return case, "refused", "", "", "", "", ""
        base = one.get("plain_heap") if one["budget"] in (None, "auto") else int(one["budget"])
        heaps = [f"{one[name] / base:.2f}" if base and name in one else "" for name in ("first_heap", "heap")]
        first = f"{one['first_s'] / one['plain_s']:.2f}" if "first_s" in one else ""
        took = one.get("settled_s") or one["seconds"]
        ratio = f"{took / one['best_s']:.3f}" if one["best_s"] else "none fits"
        return case, first, *heaps, str(one.get("cut", "")), str(one["best"] or ""), ratio

    yield from ("", "## Steps", "", *table(header, [row(one) for one in sound(records)]))
    yield from ("", 'With "auto" the heap is held against that of a plain step.')
    yield from (f"\n{one['model']} {one['share']}: {one['refused']}" for one in records if "refused" in one)


STUDY = Study(kind="memory-steps", title="Steps within a budget", judge=_judge, sections=_sections)

if __name__ == "__main__":
    sys.exit(main())
