"""One pass over some rows in one split: its loss, gradient, state, and the calls of its modules"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.check.bench import Bench
from anybatch.check.calls import Calls, Table
from anybatch.check.finding import culprit_of
from anybatch.check.rows import Rows
from anybatch.compare import Outcome, WatchedBatch
from anybatch.core import Batch, Total
from anybatch.engine import Plan, check_parts, gather
from anybatch.losses import Terms, call_loss, module_of, resolve
from anybatch.state import RowPart


class Observed(nn.Module):
    """A user's loss function; a bare mean counts as a total of weight 1."""

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.inside = module_of(function)  # registered, also if a method or an ab.PerRow holds it
        self.bare: frozenset[str] = frozenset()  # terms returned as bare means

    def forward(self, model: nn.Module, micro: Any) -> Any:
        """Return the function's totals."""
        value = call_loss(self.function, model, micro)
        named: Mapping[str, Any] = value if isinstance(value, Mapping) else {"loss": value}
        bare = {name for name, one in named.items() if isinstance(one, Tensor) and one.dim() == 0}
        self.bare |= bare
        return (
            {name: Total(one, 1) if name in bare else one for name, one in named.items()} if bare else value
        )


def observe(loss: Any) -> Any:
    """Wrap a function of the caller's; return any other loss unchanged."""
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


# (`module (Class)`, dotted name) -> value of a buffer in the state dict.
State = dict[tuple[str, str], Tensor]


def state_of(model: nn.Module, loss: nn.Module) -> State:
    """Return the saved buffers of a model and its loss, each once; those of the loss under `loss.`."""
    found, known = State(), set[int]()
    for root, prefix in ((model, ""), (loss, "loss.")):
        saved = root.state_dict(keep_vars=True)
        for path, value in root.named_buffers():
            if saved.get(path) is value and value.layout == torch.strided and id(value) not in known:
                name = path.rpartition(".")[0]
                found[culprit_of(prefix + name, root.get_submodule(name)), prefix + path] = value.detach()
                known.add(id(value))
    return found


class Recorder(Optimizer):
    """An optimizer that changes nothing and keeps the gradients it is given."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = dict(named)
        self.gradients: dict[str, Tensor] = {}
        super().__init__(list(self._named.values()), {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; torch's own function would first load its compiler, which takes a second."""
        self.param_groups.append(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        """Keep the gradients."""
        found = {name: p.grad for name, p in self._named.items()}
        self.gradients = {name: g.to_dense().clone() for name, g in found.items() if g is not None}


class Pass(Outcome):
    """One pass over some rows in one split, with the calls of modules and the state that it leaves.

    Attributes:
        failure: an error of the model, the loss or the bench; then there is no gradient.
        error, loss_error: relative to a reference, once compared.
        tables: the calls of modules, for each part of the rows.
        bare: terms that the loss returned as bare means.
        unreplayed: draws of the last micro-batch that were not replayed.
    """

    def __init__(self, bench: Bench, cut: Rows) -> None:
        self.cut, self.words = cut, cut.words
        self.failure: Exception | None = None
        self.error = self.loss_error = math.inf
        self.tables: Mapping[RowPart, Table] = {}
        self.state, self.bare = State(), frozenset[str]()
        try:
            batch = bench.own(cut.batch)  # outside of draws, which note dtypes
            with bench.fresh():
                self._run(bench, batch, observe(bench.loss))
        except Exception as error:  # the user's code may raise anything, and a device have no float64
            self.failure = error
        self.unreplayed = bench.draws.unreplayed

    def _run(self, bench: Bench, batch: Batch, loss: Any) -> None:
        calls = Calls(bench.model, bench.draws)
        self.tables = calls.tables
        watched: Any = WatchedBatch(batch, self.cut.part, bench.draws, calls.begin)
        plan = Plan(rows=batch.rows, micro_batch=self.cut.micro_batch, batch_norm=bench.batch_norm)
        optimizers, _ = check_parts(bench.model, loss, Recorder(bench.named), None)
        task = gather(bench.model, loss, optimizers, ())
        sizes = tuple([len(part.rows) for part in self.cut.parts])
        super().__init__(task, watched, plan, sizes, bench.draws, is_dry=False)
        self.state = state_of(bench.model, module_of(loss))
        self.bare = getattr(getattr(loss, "function", None), "bare", self.bare)

    def holds(self, limit: float) -> bool:
        """Return True if both errors are at most the limit."""
        return max(self.error, self.loss_error) <= limit
