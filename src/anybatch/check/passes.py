"""One pass over some rows in one split: its loss, gradient, state, and the calls of its modules"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.check.bench import CheckBench
from anybatch.check.finding import culprit_of
from anybatch.check.rows import Rows
from anybatch.core import Batch, Total, torch_private as private, tree
from anybatch.engine import Plan, check_parts, gather
from anybatch.losses import Terms, call_loss, module_of, resolve
from anybatch.state import rng
from anybatch.trial import Outcome, Replayed, RowPart, WatchedBatch, take

Key = tuple[str, int]  # a module's name, and the number of its call in a micro-batch
Table = Mapping[Key, "Call"]  # the calls of some rows, in the order of their ends: inner ones first


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module."""

    key: Key
    arguments: Any  # positional ones and keywords, with copies of tensors
    state: rng.RandomState  # of the random streams
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    is_outermost: bool = False  # True if no other module called this one

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors(self.arguments)

    def repeat(self, module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call a module in the same way, with copies of these tensors in place of its own."""
        rest = iter(inputs)
        args, kwargs = tree.map_leaves(lambda _: next(rest).clone(), self.arguments)
        return _tensors(_copied(module(*args, **kwargs)))


class Calls:
    """Hooks that record the calls of modules: for each part of a batch those of its last forward.

    Args:
        model: whose modules are watched.
        draws: replayed for each part.
        known: calls with the outputs of all rows, which replace those of the same outermost calls.
    """

    def __init__(self, model: nn.Module, draws: Replayed, known: Table | None = None) -> None:
        self._draws, self._known = draws, known or {}
        self.tables: dict[RowPart, dict[Key, Call]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(self._after)
        self.begin(RowPart.whole(1))

    def __deepcopy__(self, memo: object) -> "Calls":
        """Return itself: a loss may copy the model, hooks included."""
        return self

    def begin(self, part: RowPart) -> None:
        """Begin a micro-batch of these rows."""
        self._draws.begin(part)
        self._part, self._counts, self._open = part, Counter[str](), list[Call]()
        self._table = self.tables[part] = {}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not private.is_in_backward():  # recomputed calls are known
            key = name, self._counts[name]
            self._counts[name] += 1
            self._open.append(Call(key, _copied((args, kwargs)), rng.capture()))

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if private.is_in_backward():
            return None
        call = self._open.pop()
        call.outputs, call.is_outermost = _tensors(_copied(outputs)), not self._open
        self._table[call.key] = call
        known = self._known.get(call.key)
        return self._replaced(outputs, known.outputs) if known and call.is_outermost else None

    def _replaced(self, output: Any, known: Sequence[Tensor]) -> Any:
        rest = iter(known)

        def replaced(leaf: Tensor) -> Tensor:
            value = next(rest, None)
            value = None if value is None else take(value, leaf.shape, self._part)
            # A loss may ask for a gradient inside, and write in place, which a leaf does not allow.
            return leaf if value is None else value.clone().requires_grad_(leaf.requires_grad) * 1

        return tree.map_leaves(replaced, output)


def _copied(value: Any) -> Any:
    return tree.map_leaves(lambda tensor: tensor.detach().clone(), value)


def _tensors(value: Any) -> list[Tensor]:
    return [*tree.flatten(value, keeps=True).leaves]


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
        totals = {name: Total(one, 1) if name in bare else one for name, one in named.items()}
        return totals if bare else value


def observe(loss: Any) -> Any:
    """Wrap a function of the caller's; return any other loss unchanged."""
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


# (`module (Class)`, dotted name) -> value of a buffer in the state dict.
State = dict[tuple[str, str], Tensor]


def state_of(model: nn.Module, loss: nn.Module) -> State:
    """Return the saved buffers of a model and its loss, each once; those of the loss under `loss.`."""
    both = nn.ModuleDict({"model": model, "loss": loss})
    saved, found = both.state_dict(keep_vars=True), State()
    for path, value in both.named_buffers():
        if saved.get(path) is value and value.layout == torch.strided:
            module, name = both.get_submodule(path.rpartition(".")[0]), path.removeprefix("model.")
            found[culprit_of(name.rpartition(".")[0], module), name] = value.detach()
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
        is_same: True if both are rounding.
        tables: the calls of modules, for each part of the rows.
        bare: terms that the loss returned as bare means.
        unreplayed: draws of the last micro-batch that were not replayed.
    """

    def __init__(self, bench: CheckBench, cut: Rows) -> None:
        self.cut, self.words = cut, cut.words
        self.failure: Exception | None = None
        self.error = self.loss_error = math.inf
        self.is_same = False
        self.tables: Mapping[RowPart, Table] = {}
        self.state, self.bare = State(), frozenset[str]()
        try:
            batch = bench.own(cut.batch)  # outside of draws, which note dtypes
            with bench.fresh():
                self._run(bench, batch, observe(bench.loss))
        except Exception as error:  # the user's code may raise anything, and a device have no float64
            self.failure = error
        self.unreplayed = bench.draws.unreplayed

    def _run(self, bench: CheckBench, batch: Batch, loss: Any) -> None:
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
