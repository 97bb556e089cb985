"""Small models on a device against the CPU's whole batch, as one table for an issue.

Run alone by `python -m benchmarks.gpu.selftest --device NAME`.
"""

import argparse
import copy
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.cli.train import find_device
from anybatch.core import PlanError, RankError, accelerator, format_bytes, tree
from anybatch.losses import ModelLoss, WholeBatch
from anybatch.parallel import is_launched, launch, rank, start_under_torchrun
from anybatch.step import Options, Step
from anybatch.trial import limit_of, relative_error

ROWS = 11
SECONDS = 150  # rows of the table that would begin later are left out
_Result = tuple[bool | None, str]  # of a row of the table; None: left out, for this reason
_Case = tuple[nn.Module, Any, Any]  # a model, a batch and a loss
_Change = dict[str, Tensor]  # of each parameter, by two updates


class _Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0][:, -1]


class _Decoder(nn.Module):
    """A causal transformer with tied embeddings; with labels it returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        mask = torch.ones(2 * [tokens.shape[1]], dtype=torch.bool, device=tokens.device).triu(1)
        logits = (self.layer(self.embedding(tokens), mask) @ self.embedding.weight.T).transpose(1, 2)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def _contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, targets)


def _convolution(norm: nn.Module) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), norm, nn.GELU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(72, 4))


def _cases() -> dict[str, _Case]:
    """Return small models by name, the same each time; a third of the classes is ignored by the loss."""
    torch.manual_seed(0)
    numbers, images, tokens = torch.randn(ROWS, 6), torch.randn(ROWS, 3, 8, 8), torch.randint(13, (ROWS, 6))
    labels = tokens.roll(-1, 1).where(tokens > 3, -100)
    classes = (tokens[:, 0] % 6 - 2).where(tokens[:, 0] % 6 > 1, -100)
    perceptron = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    recurrent = nn.Sequential(nn.LSTM(8, 8, batch_first=True), _Last(), nn.Linear(8, 4))
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    embedding = nn.Sequential(nn.Embedding(13, 4), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 6))
    mirror = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3))
    loss = nn.CrossEntropyLoss()
    return {
        "perceptron": (perceptron, (numbers, classes), loss),
        "class weights": (perceptron, (numbers, classes), nn.CrossEntropyLoss(torch.rand(4))),
        "convolution": (_convolution(nn.GroupNorm(2, 8)), (images, classes), loss),
        "frozen BatchNorm": (_convolution(nn.BatchNorm2d(8).eval()), (images, classes), loss),
        "transposed convolution": (mirror, (images, images), nn.SmoothL1Loss()),
        "LSTM": (recurrent, (images[:, 0], classes), loss),
        "encoder": (encoder, (images[:, 0], images[:, 1]), nn.MSELoss()),
        "decoder": (_Decoder(), (tokens, labels), loss),
        "embedding": (embedding, (tokens, numbers.sigmoid()), nn.BCEWithLogitsLoss()),
        "a model's own loss": (_Decoder(), {"tokens": tokens, "labels": labels}, ModelLoss()),
        "contrastive": (perceptron, (numbers, torch.arange(ROWS)), WholeBatch(_contrast)),
    }


def _on(device: torch.device, dtype: torch.dtype, case: _Case) -> tuple[nn.Module, Any, Any, Any]:
    """Return model, batch and loss on a device, and an optimizer."""
    (model, loss), batch = copy.deepcopy(case[::2]), case[1]
    batch = tree.map_leaves(lambda one: one.to(device, dtype if one.is_floating_point() else None), batch)
    loss = loss.to(device, dtype) if isinstance(loss, nn.Module) else loss
    model = model.to(device, dtype)
    return model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def _changed(case: _Case, model: nn.Module, update: Callable[[], bool]) -> _Change:
    """Return the change by two updates, on the CPU in float64; nothing if one was not made."""
    before, is_done = dict(case[0].named_parameters()), update() and update()
    after = dict(model.named_parameters()) if is_done else {}
    return {name: one.detach().cpu().double() - before[name] for name, one in after.items()}


def _whole(case: _Case) -> _Change:
    """Return the change by the whole batch: plain torch, on the CPU, in float64."""
    model, batch, loss, optimizer = _on(torch.device("cpu"), torch.float64, case)

    def update() -> bool:
        optimizer.zero_grad()
        is_own, mean = isinstance(loss, ModelLoss), getattr(loss, "function", loss)
        (model(**batch)["loss"] if is_own else mean(model(batch[0]), batch[1])).backward()
        optimizer.step()
        return True

    return _changed(case, model, update)


def _step(step: Step, batch: Any) -> bool:
    return step(batch).updated


def _window(step: Step, batch: Any) -> bool:
    with step.window() as window:
        for rows in (slice(5), slice(5, 6), slice(6, ROWS)):
            window.add([one[rows] for one in batch])
    return True


def _on_rank(step: Step, batch: Any) -> bool:
    return _step(step, [one[slice(4) if rank() else slice(4, ROWS)] for one in batch])


def _out_of_memory(step: Step, batch: Any) -> bool:
    """Run out of memory in forward with more than 6 rows, and in backward with more than 3."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError(f"planted in {type(step.model).__name__}")

    def limit(model: nn.Module, inputs: object, output: Tensor) -> None:
        if len(output) > 3:
            output.register_hook(fail)
        if len(output) > 6:
            fail()

    with step.model.register_forward_hook(limit):
        return _step(step, batch)


class _SelfTest:
    def __init__(self, device: torch.device) -> None:
        self.device, self.dtypes = device, [torch.float64, torch.float32]
        try:
            torch.ones((), dtype=torch.float64, device=device)
        except (TypeError, RuntimeError):  # MPS has none
            self.dtypes = [torch.float32]

    def change(self, case: _Case, dtype: torch.dtype, run: Any = _step, **keywords: Any) -> _Change:
        """Return the change by steps on the device."""
        torch.manual_seed(0)
        model, batch, loss, optimizer = _on(self.device, dtype, case)
        step = Step(model, loss, optimizer, **keywords)
        return _changed(case, model, lambda: run(step, batch))

    def compare(self, case: _Case, *dtypes: torch.dtype, **keywords: Any) -> _Result:
        """Compare steps that compute in these dtypes with the whole batch."""
        is_mixed, told, results, whole = "precision" in keywords, list[str](), list[bool](), _whole(case)
        if is_mixed and not torch.amp.is_autocast_available(self.device.type):
            return None, "no autocast on this device"
        for dtype in dtypes or self.dtypes:
            change = self.change(case, torch.float32 if is_mixed else dtype, **keywords)
            error, limit = relative_error(change, whole), limit_of([dtype], ROWS)
            results.append(error <= limit)
            told.append(f"{str(dtype)[6:]} {error:.0e} of {limit:.0e}")
        return all(results), "; ".join(told)

    def refuse(self) -> _Result:
        """Split a batch through BatchNorm in training mode."""
        _, *rest = _cases()["convolution"]
        try:
            self.change((_convolution(nn.BatchNorm2d(8)), *rest), torch.float32, micro_batch=3)
        except PlanError as error:
            return "BatchNorm" in str(error), "in training mode it is refused by name"
        return False, "in training mode it was split"

    def bits(self, policy: str) -> _Result:
        """Compare activations that are recomputed, or wait in host memory, with those that are kept."""
        layer = nn.TransformerEncoderLayer(64, 2, 128, 0.1, batch_first=True)
        model, rows = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(64, 32, 64)
        found, seconds = list[_Change](), list[float]()
        for one in (None, policy, None, policy):  # the first two warm up
            begin, options = time.perf_counter(), Options(recompute=one, check=False)
            case = model, (rows, rows), nn.MSELoss()
            found.append(self.change(case, torch.float32, micro_batch=32, options=options))
            seconds.append(time.perf_counter() - begin)
        is_same = all(torch.equal(value, each[name]) for name, value in found[0].items() for each in found)
        told = f"{'the same' if is_same else 'other'} bits, {seconds[3] / seconds[2]:.2f} of the time"
        return is_same, told

    def tight(self, *, is_budget: bool) -> _Result:
        """Make updates in half of their memory: in a budget, or on a device that is limited to it."""
        layers = nn.Linear(16, 1024), nn.Tanh(), nn.GELU(), nn.Tanh(), nn.Linear(1024, 4)
        batch = torch.randn(2048, 16), torch.randint(4, (2048,))
        case = nn.Sequential(*layers), batch, nn.CrossEntropyLoss()
        before, peaks, cuts = accelerator.forget_peak(self.device), list[int](), list[int]()

        def run(step: Step, batch: Any, times: int = 1) -> bool:
            is_done = True
            for _ in range(times):
                accelerator.forget_peak(self.device)
                report = step(batch)
                peaks.append((accelerator.peak_bytes(self.device) or 0) - (before or 0))
                cuts.append(report.micro_batches)
                is_done = is_done and report.updated
            return is_done

        self.compare(case, torch.float32, run=run)  # in the first step, libraries take workspaces
        half = peaks[-1] // 2 or 16_000_000
        accelerator.free_cache()
        capped = accelerator.capped(self.device, (before or 0) + half)
        with nullcontext(True) if is_budget else capped as is_limited:
            if not is_limited:
                return None, "torch cannot limit the memory of this device"
            keywords: dict[str, Any] = {"memory": half} if is_budget else {"options": Options(check=False)}
            is_exact, told = self.compare(case, torch.float32, run=run, **keywords)
            # Steps that read their memory begin a new peak; the last of these does not.
            self.change(case, torch.float32, run=partial(run, times=3), **keywords)
        used = f"{format_bytes(peaks[-1]) if before is not None else 'not counted'} of {format_bytes(half)}"
        return is_exact and cuts[-1] > 1 and peaks[-1] <= half, f"{used}, {cuts[-1]} micro-batches; {told}"

    def ranks(self) -> _Result:
        """Start two ranks, each of which calls `be_a_rank`."""
        count = 2 if self.device.type == "cpu" else torch.accelerator.device_count()
        if count < 2:
            return None, f"{count} device"
        launch(2, ["benchmarks.gpu.selftest", "--device", self.device.type])
        return True, "4 and 7 rows make the update of the whole batch"

    def be_a_rank(self) -> None:
        """Make an update together with another rank; raise RankError if it is not that of the whole batch."""
        start_under_torchrun()
        is_exact, told = self.compare(_cases()["perceptron"], torch.float32, run=_on_rank)
        if not is_exact:
            raise RankError(f"Expected the update of the whole batch on two ranks, got {told}.")

    def rows(self) -> Iterator[tuple[str, Callable[[], _Result]]]:
        cases, unchecked = _cases(), Options(check=False)
        few = cases["perceptron"]
        yield from ((name, partial(self.compare, case, micro_batch=3)) for name, case in cases.items())
        yield "window", partial(self.compare, few, run=_window)
        yield "BatchNorm", self.refuse
        yield "recompute", partial(self.bits, "all")
        yield "offload", partial(self.bits, "offload")
        mixed = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
        for name, model in product(mixed, ("perceptron", "convolution", "encoder")):
            case = partial(self.compare, cases[model], mixed[name], micro_batch=3, precision=name)
            yield f"{name} {model}", case
        yield "out of memory, planted", partial(self.compare, few, run=_out_of_memory, options=unchecked)
        yield "out of memory, limited", partial(self.tight, is_budget=False)
        yield "budget", partial(self.tight, is_budget=True)
        yield "ranks", self.ranks


def selftest(device: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the result of each row with its figures, and the table."""
    test = _SelfTest(find_device(device))
    begin, rows = time.monotonic(), dict[str, tuple[str, str]]()
    card = platform.machine() if test.device.type == "cpu" else accelerator.name_of(test.device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 is float32
        for name, run in test.rows():
            is_over = time.monotonic() - begin > SECONDS
            try:
                passed, told = (None, f"{SECONDS} s are over") if is_over else run()
            except Exception as error:  # it fails its row of the table
                passed, told = False, f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
            rows[name] = {None: "left out", True: "ok", False: "FAILED"}[passed], told
    found = [one for one, _ in rows.values()]
    counts = ", ".join(f"{found.count(one)} {one}" for one in ("ok", "FAILED", "left out"))
    text = f"""anybatch {ab.__version__}, torch {torch.__version__}, Python {platform.python_version()}
device {test.device} ({card}), {platform.system()}\n
{chr(10).join(f"{name:<23} {one:<8}  {told}" for name, (one, told) in rows.items())}\n
{counts}; {time.monotonic() - begin:.0f} s"""
    return rows, text


def main() -> int:
    """Print the table, or be one of its ranks; return 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, an accelerator as torch names it, or auto")
    device = parser.parse_args().device
    if is_launched():
        _SelfTest(find_device(device)).be_a_rank()
        return 0
    rows, text = selftest(device)
    print(text)
    return any(one == "FAILED" for one, _ in rows.values())


if __name__ == "__main__":
    sys.exit(main())
