"""`python -m benchmarks.memory_heap`: twelve models nobody tuned to, each within shares of its plain heap.

Base of a share: the heap of the plain whole-batch step, the most of steps 2 and 3. The budget is the statics
(parameters, gradients, optimizer state, batch) and this share of what lies above them.
"""

import argparse
import gc
import json
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import anybatch as ab
from anybatch.recompute import find_blocks
from benchmarks.memory_report import child, write_lines
from benchmarks.memory_steps import CASES, WORDS, Batch, Case, Training, counted, tokens

MODULE = "benchmarks.memory_heap"
FIRST = 6  # steps that are held against the budget
ROUNDS, FINALISTS = 5, 2  # in turn with the fastest sizes by hand, once settled
TRIED = 5  # sizes by hand, the largest that fit
HOLDS = 1.03


class Tagger(nn.Module):
    """LSTM over packed rows, or GRU over padded ones."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 96), nn.Linear(128, 200)
        self.body = kind(96, 128, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.words(ids)
        if isinstance(self.body, nn.GRU):
            return self.head(self.body(x)[0]).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x = pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(x[0]).transpose(1, 2)


class Towers(nn.Module):
    """Images and texts in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(_convolutions(nn.Conv2d, 24, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(1))
        layer = nn.TransformerEncoderLayer(24, 4, 256, dropout=0.0, batch_first=True)
        self.words, self.text = nn.Embedding(WORDS, 24), nn.TransformerEncoder(layer, 2)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image)[..., 0]), F.normalize(self.text(self.words(text)).mean(1))


def _convolutions(kind: Any, maps: int, first: int) -> nn.Module:
    inner = [nn.Sequential(kind(one, maps, 3, padding=1), nn.GELU()) for one in (first, *[maps] * 3)]
    return nn.Sequential(*inner)


def _info_nce(image: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(image @ text.T / 0.07, torch.arange(len(image)))


def _made(model: str, **config: Any) -> Callable[[], nn.Module]:
    """Return the maker of a model of transformers; its configuration has the same name."""
    kind: Any = getattr(transformers, model)
    return lambda: kind(kind.config_class(**config))


def _tagged(rows: int, length: int) -> Batch:
    lengths = torch.tensor([length - (17 * row) % (length - 8) for row in range(rows)])
    ids, kept = tokens(rows, length), torch.arange(length) < lengths[:, None]
    return {"ids": ids, "lengths": lengths, "labels": (ids % 200).masked_fill(~kept, -100)}


# fmt: off
_IMAGES: dict[str, Any] = {
    "weight": lambda part: len(part["labels"]), "size": (64, 64),
    "batch": lambda rows, side: {
        "pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(9, (rows,)),
    },
}
_TAGS: dict[str, Any] = {
    "batch": _tagged, "loss": nn.CrossEntropyLoss, "size": (96, 96),
    "plain_loss": lambda model, part: F.cross_entropy(model(part["ids"], part["lengths"]), part["labels"]),
}
_SWIN = _made("SwinForImageClassification", image_size=64, embed_dim=48, depths=[2, 2, 2],
              num_heads=[2, 4, 8], window_size=4, drop_path_rate=0.0, num_labels=10)
_VIT = _made("ViTForImageClassification", hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
             intermediate_size=512, image_size=64, patch_size=8, num_labels=10)
_DEBERTA = _made("DebertaV2ForMaskedLM", vocab_size=WORDS, hidden_size=128, num_hidden_layers=3,
                 num_attention_heads=4, intermediate_size=512, max_position_embeddings=128,
                 relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32)  # with dropout
_MAMBA = _made("MambaForCausalLM", vocab_size=WORDS, hidden_size=96, num_hidden_layers=3, use_cache=False)
MODELS: Mapping[str, Case] = {
    "unet3d": replace(CASES["unet3d"], size=(16, 0)),
    "conv3d": Case(
        build=lambda: _convolutions(nn.Conv3d, 16, 1), weight=lambda part: len(part[0]), size=(64, 12),
        batch=lambda rows, side: (torch.randn(rows, 1, *[side] * 3), torch.randn(rows, 16, *[side] * 3)),
        loss=nn.MSELoss, plain_loss=lambda model, part: F.mse_loss(model(part[0]), part[1]),
    ),
    "convnext": replace(CASES["convnext"], size=(96, 0)),
    "swin": Case(build=_SWIN, **_IMAGES),
    "vit": Case(build=_VIT, **_IMAGES),
    "deberta": replace(CASES["bert"], build=_DEBERTA, size=(32, 64)),
    "whisper": CASES["whisper"],
    "mamba": replace(CASES["llama"], build=_MAMBA, size=(24, 48)),
    "llama": CASES["llama"],
    "lstm": Case(build=lambda: Tagger(nn.LSTM), **_TAGS),
    "gru": Case(build=lambda: Tagger(nn.GRU), **_TAGS),
    "towers": Case(
        build=Towers, loss=lambda: ab.WholeBatch(_info_nce), weight=lambda part: 1.0, size=(192, 32),
        batch=lambda rows, side: {"image": torch.randn(rows, 3, side, side), "text": tokens(rows, side)},
        plain_loss=lambda model, part: _info_nce(*model(**part)),
    ),
}
# fmt: on


def counted_traces() -> Mock:
    """Count the calls of `planner.trace.trace` from now on, under whatever name; none if it is gone."""
    old = getattr(sys.modules.get("anybatch.planner.trace"), "trace", None)
    counter = Mock(wraps=old)
    for module in [one for name, one in sys.modules.items() if old and name.startswith("anybatch")]:
        if vars(module).get("trace") is old:
            vars(module)["trace"] = counter
    return counter


def _again(training: Training, batch: Batch) -> str:
    """Count the blocks that ran again in one more step, as `k of L`."""
    blocks = [training.model.get_submodule(name) for name in find_blocks(training.model)]
    calls = Counter[nn.Module]()
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(lambda module, _: calls.update([module])))
        training.step(batch)
    parts = len(training.cut)
    passes = parts * (2 if isinstance(training.case.loss(), ab.WholeBatch) and parts > 1 else 1)
    return f"{sum(calls[block] > passes for block in blocks)} of {len(blocks)}"


def _steps(case: Case, batch: Batch, budget: int) -> tuple[Training, dict[str, Any], ab.BudgetError | None]:
    """Return our training, what its first steps took, and the refusal, if there was one."""
    ours, runs, error = Training(case, memory=budget), list[tuple[float, int]](), None
    try:
        runs.extend(ours.step(batch) for _ in range(FIRST))
    except ab.BudgetError as found:
        error = found
    (seconds, first), *later = runs or [(0.0, 0)]
    took = {
        "first_s": seconds,
        "first_heap": first / budget,
        "heap": max([one for _, one in later], default=0) / budget,
    }
    return ours, took | ({"refused_in_step": len(runs) + 1} if error else {}), error


def measure(name: str, share: float) -> Iterator[dict[str, Any]]:
    """One model under one budget: CPU seconds, and bytes as malloc counts them."""
    case, traces = MODELS[name], counted_traces()
    torch.manual_seed(1)
    batch = case.batch(*case.size)
    plain = Training(case)
    runs = [plain.step(batch, case.size[0]) for _ in range(4)][1:]
    whole_s, peak = min(s for s, _ in runs), max(heap for _, heap in runs)
    held = plain.held(batch) + sum(p.nbytes for p in plain.model.parameters())  # and gradients
    del plain
    budget = held + int(share * (peak - held))
    ours, took, error = _steps(case, batch, budget)
    record = {"case": f"{name} {share:.0%}", "plain_MB": peak / 1e6, "statics_MB": held / 1e6}
    record |= {"budget_MB": budget / 1e6, "plain_s": whole_s, **took, "first_s": took["first_s"] / whole_s}
    record |= {"traces": traces.call_count}
    if error is None:
        cut = ours.cut
        yield record | {"cut": cut, "again": _again(ours, batch), **_settled(case, batch, ours, budget)}
        return
    smallest = error.smallest or 0  # given, and 0.9 of it
    for key, of_it in (("at_smallest", smallest), ("at_0.9", int(0.9 * smallest))):
        gc.collect()
        _, then, refused = _steps(case, batch, of_it) if of_it else (None, {}, None)
        record[key] = f"refused in step {then['refused_in_step']}" if refused else then.get("heap")
    yield record | {"smallest_MB": smallest / 1e6, "said": str(error)}


def _settled(case: Case, batch: Batch, ours: Training, budget: int) -> dict[str, Any]:
    """Seconds of our steps beside those of the fastest `micro_batch=` whose heap is within the budget."""
    rows, fitting = case.size[0], dict[str, tuple[float, Training]]()
    again = (None, "all") if find_blocks(ours.model) else (None,)
    sizes = sorted({-(-rows // min(rows, parts << k)) for k in range(9) for parts in (1, 3)}, reverse=True)
    for blocks, size in ((blocks, size) for blocks in again for size in sizes):
        if len(fitting) == TRIED or (fitting and blocks):  # all blocks again only where nothing else fits
            break
        by_hand = Training(case, micro_batch=size, options=ab.Options(recompute=blocks))
        runs = [by_hand.step(batch) for _ in range(3)][1:]
        if max(heap for _, heap in runs) <= HOLDS * budget:
            fitting[f"{size}{' all again' if blocks else ''}"] = min(s for s, _ in runs), by_hand
    ratios = dict[str, float]()
    for name in sorted(fitting, key=lambda one: fitting[one][0])[:FINALISTS]:
        by_hand = fitting[name][1]
        pairs = [ours.step(batch)[0] / by_hand.step(batch)[0] for _ in range(ROUNDS)]
        ratios[name] = statistics.median(pairs)
    best = max(ratios, key=ratios.__getitem__, default=None)
    return {"settled": best and ratios[best], "best_by_hand": best, "cut_then": ours.cut}


def main(arguments: Sequence[str] | None = None) -> int:
    """Each case in a process of its own, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*MODELS], choices=[*MODELS], metavar="NAME")
    parser.add_argument("--share", nargs="+", type=float, default=[0.7, 0.5, 0.3, 0.15])
    for hidden in ("--child", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        name, share = options.child.split(":")
        write_lines(measure(name, float(share)), Path(options.out))
        return 0
    with counted() as environment:
        for case in [f"{name}:{share}" for name in options.only for share in options.share]:
            record = child(MODULE, ["--child", case], environment=environment)[-1]
            told = {key: round(one, 3) if isinstance(one, float) else one for key, one in record.items()}
            print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
