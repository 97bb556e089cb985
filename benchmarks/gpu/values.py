"""Sections about values: the self test, exactness, short dtypes, and what is left when memory runs out."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import accelerator, tree
from anybatch.trial import relative_error
from benchmarks import tasks
from benchmarks.gpu import nets, selftest as table
from benchmarks.gpu.notes import Notes

DEVICE_TESTS = 150  # seconds


def selftest(notes: Notes) -> None:
    """Print the table of small models, then run the tests that run on any device."""

    def own() -> None:
        found, text = table.selftest(str(notes.device))
        print(text)
        rows = [(name, *one) for name, one in found.items()]
        notes.add("selftest", "ok", sum(one == "ok" for _, one, _ in rows))
        notes.add("selftest", "left out", sum(one == "left out" for _, one, _ in rows))
        notes.add("selftest", "failed", sum(one == "FAILED" for _, one, _ in rows))
        for name, one, told in rows:
            if one == "FAILED":
                notes.add(name, "told", told)

    def tests() -> None:
        import pytest  # noqa: F401

        workers = ["-n", "14"] if find_spec("xdist") else []
        which = ["tests/step/test_window.py"] if notes.small else ["@tests/on_device.txt"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-m", "not slow", *which]
        command += ["--device", notes.device.type, *([] if notes.small else workers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=DEVICE_TESTS, env=environment
            )
        except subprocess.TimeoutExpired:
            notes.state["late"].append("device tests")
            return
        lines = run.stdout.strip().splitlines() or [run.stderr[-300:]]
        notes.add("device tests", "told", lines[-1])
        for line in [one for one in lines if one.startswith(("FAILED", "ERROR"))][:40]:
            notes.add(line[:160], "told", "")
        notes.add("device tests", "device tests", run.returncode)

    notes.each({"selftest": own, "device tests": tests})


class Packed(nn.Module):
    """An LSTM over rows of unequal lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence
        packed = pack(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


def _tokens(model: nn.Module, part: Any) -> ab.Total:
    """Return the summed loss of the valid tokens, and their number."""
    logits, labels = model(**part).logits[:, :-1], part["labels"][:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return ab.Total(loss, (labels != -100).sum())


def _family(name: str) -> tuple[nn.Module, Any, Any]:
    """Return a model, its loss and a batch of 12 rows; small, so that float64 is fast everywhere."""
    draw = torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    if name in ("gpt2", "bert", "vit", "unet", "lstm", "resnet50"):
        model, loss, batch_of = nets.make(name, small=True)
        batch = batch_of(12, draw)
        if name == "gpt2":  # unequal numbers of tokens
            lengths = torch.randint(3, 12, (12, 1), generator=draw)
            batch["labels"] = batch["labels"].where(torch.arange(12) < lengths, -100)
            loss = _tokens  # the model's own loss is in float32
        if name == "unet":  # frozen norms
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return model, loss, batch
    if name == "gpt":
        task = tasks.TASKS["gpt"]
        return tasks.make_model(task, seed=0), task.loss, tasks.make_batch(task, 12, seed=2, ragged=True)
    numbers, classes = torch.randn(12, 6, 8, generator=draw), torch.randint(5, (12,), generator=draw)
    if name == "lstm packed":
        lengths = torch.randint(1, 7, (12,), generator=draw)
        return Packed(), nn.CrossEntropyLoss(), ((numbers, lengths), classes)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 5))
    if name == "contrastive":
        contrast = ab.WholeBatch(lambda out, target: nn.functional.cross_entropy(out @ out.T, target))
        return flat, contrast, (numbers, torch.arange(12))
    if name == "dropout replayed":
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 5)), nn.CrossEntropyLoss(), (numbers, classes)
    weights = torch.rand(5, generator=draw)
    return flat, nn.CrossEntropyLoss(weights), (numbers, classes)


FAMILIES = ("gpt2", "gpt", "bert", "vit", "unet", "lstm", "resnet50", "lstm packed", "contrastive",
            "dropout replayed", "class weights")  # fmt: skip


def _placed(case: tuple[nn.Module, Any, Any], notes: Notes, dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    model, loss, batch = copy.deepcopy(case)
    place = partial(Tensor.to, device=notes.device)
    batch = tree.map_leaves(
        lambda one: place(one, dtype=dtype) if one.is_floating_point() else place(one), batch
    )
    loss = loss.to(notes.device, dtype) if isinstance(loss, nn.Module) else loss
    return model.to(notes.device, dtype), loss, batch


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().cpu().double() for name, one in model.named_parameters()}


def _after(
    case: tuple[nn.Module, Any, Any], notes: Notes, dtype: torch.dtype, updates: int = 2, **asked: Any
) -> dict[str, Tensor]:
    """Return the weights' change by updates of `ab.Step`, or, with nothing asked, of plain torch."""
    model, loss, batch = _placed(case, notes, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = _weights(model)
    torch.manual_seed(5)
    step = ab.Step(model, loss, optimizer, **asked) if asked else None
    for _ in range(updates):
        if step is not None:
            step(batch)
            continue
        function = getattr(loss, "function", loss) if isinstance(loss, ab.WholeBatch) else None
        (function(model(batch[0]), batch[1]) if function else nets.mean(model, loss, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one - before[name] for name, one in _weights(model).items()}


def exact(notes: Notes) -> None:
    """Compare any cut with the whole batch, and the uncut step with torch, to the bit."""

    def one(name: str) -> None:
        case = _family(name)
        for dtype in (torch.float64, torch.float32):
            if name == "dropout replayed":  # recompute replays the masks
                every = ab.Options(recompute=["0"])
                whole = _after(case, notes, dtype, micro_batch=5)
                found = {5: _after(case, notes, dtype, micro_batch=5, options=every)}
            else:
                whole = _after(case, notes, dtype)
                found = {rows: _after(case, notes, dtype, micro_batch=rows) for rows in (1, 5)}
            worst = max(relative_error(change, whole) for change in found.values())
            # transformers' causal models compute their loss in float32.
            is_short = dtype == torch.float64 and name in ("gpt2", "t5")
            notes.add(name, "float64, loss in float32" if is_short else str(dtype)[6:], worst)
        uncut, plain = (_after(case, notes, dtype, **asked) for asked in ({"micro_batch": 12}, {}))
        notes.add(name, "other bits uncut", sum(not torch.equal(uncut[key], plain[key]) for key in plain))

    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        notes.each({name: partial(one, name) for name in FAMILIES})
    torch.use_deterministic_algorithms(False)


def precision(notes: Notes) -> None:
    """Compare weights after 20 updates in short dtypes with those of the whole batch in float32."""

    def one(name: str, short: str) -> None:
        case = _family(name)
        whole = _after(case, notes, torch.float32, updates=20)
        notes.add(
            f"{name} {short}",
            "weights",
            relative_error(
                _after(case, notes, torch.float32, updates=20, micro_batch=5, precision=short), whole
            ),
        )

    def overflow() -> None:
        model, loss, batch = _placed(_family("class weights"), notes, torch.float32)
        chosen = ab.Precision(compute="float16", loss_scale=2.0**24)
        step = ab.Step(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5, precision=chosen)
        reports = [step(batch) for _ in range(3)]
        notes.add("fp16 overflow", "redone", sum(report.redone for report in reports))
        notes.add("fp16 overflow", "updates left out", sum(not report.updated for report in reports))
        notes.add("fp16 overflow", "scale", f"{reports[-1].scale:g}")

    shorts = ("bf16-mixed", "fp16-mixed", "tf32")
    cases: dict[str, Callable[[], None]] = {
        f"{name} {short}": partial(one, name, short)
        for name in ("class weights", "gpt2", "vit")
        for short in shorts
    }
    notes.each(cases | {"fp16 overflow": overflow})


def oom(notes: Notes) -> None:
    """Run out of the device's memory for real: the update is the same, and nothing is lost."""
    room = accelerator.free_and_total(notes.device)
    case = _family("class weights")

    def hog(*_: object) -> None:
        """Ask for more than there is: twice the card, or more than a limit that is set for a moment."""
        is_card = room is not None and not notes.small
        limit = accelerator.allocated(notes.device) + 2**20
        with nullcontext() if is_card else accelerator.capped(notes.device, limit):
            size = 2**60 if room is None else 2 * room[1] if is_card else 2**24
            torch.empty(size, dtype=torch.uint8, device=notes.device)

    def run(where: str) -> None:
        whole = _after(case, notes, torch.float64, updates=1)
        model, loss, batch = _placed(case, notes, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before, is_planted = _weights(model), [True]

        def limit(_: nn.Module, __: object, output: Tensor) -> None:
            if len(output) > 4 and where == "forward":
                hog()
            if len(output) > 4 and where == "backward":
                output.register_hook(hog)

        model.register_forward_hook(limit)
        step = ab.Step(model, loss, optimizer, options=ab.Options(check=False))
        if where == "update":
            optimizer.register_step_pre_hook(lambda *_: hog() if is_planted.pop() else None)
            try:
                step(batch)
            except Exception as error:
                notes.add(where, "raised", type(error).__name__)
            same = all(torch.equal(one, before[name]) for name, one in _weights(model).items())
            notes.add(where, "state changed", float(not same))
            is_planted.append(False)
        reports: list[ab.StepReport] = []
        notes.add(where, "seconds", notes.seconds(lambda: reports.append(step(batch))))
        notes.add(where, "redone", reports[0].redone)
        change = {name: one - before[name] for name, one in _weights(model).items()}
        notes.add(where, "error", relative_error(change, whole))

    cases: dict[str, Callable[[], None]] = {
        where: partial(run, where) for where in ("forward", "backward", "update")
    }
    notes.each(cases | {"another process": partial(_crowded, notes)})


HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def _crowded(notes: Notes) -> None:
    """Make an update while another process holds nearly all memory of the device."""
    room = accelerator.free_and_total(notes.device)
    if room is None or notes.small:
        notes.add("another process", "left out", "needs a card")
        return
    model = nn.Sequential(nn.Linear(64, 8192), nn.GELU(), nn.Linear(8192, 64)).double().to(notes.device)
    rows = torch.randn(60_000, 64, dtype=torch.float64, device=notes.device)  # about 8 GB of activations
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    step = ab.Step(
        twin, nn.MSELoss(), torch.optim.SGD(twin.parameters(), lr=0.1), options=ab.Options(check=False)
    )
    before = _weights(model)
    nn.functional.mse_loss(model(rows), rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = {name: one - before[name] for name, one in _weights(model).items()}
    accelerator.free_cache()
    free = accelerator.module_of(notes.device).mem_get_info(notes.device)[0]
    command: Sequence[str] = [sys.executable, "-c", HOLD, str(notes.device), str(free - 4 * 2**30)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        notes.add("another process", "says", other.stdout.readline().strip())
        reports: list[ab.StepReport] = []
        notes.add("another process", "seconds", notes.seconds(lambda: reports.append(step(rows_of(rows)))))
        other.communicate()
    notes.add("another process", "redone", reports[0].redone)
    notes.add("another process", "micro-batches", reports[0].micro_batches)
    change = {name: one - before[name] for name, one in _weights(twin).items()}
    notes.add("another process", "error", relative_error(change, whole))


def rows_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as their own targets."""
    return rows, rows
