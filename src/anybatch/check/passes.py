"""One pass over some rows in one split: its loss, gradient, state, and the calls of its modules"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.check.draws import Draws
from anybatch.check.finding import culprit_of
from anybatch.check.rows import RowCut
from anybatch.check.subject import Subject
from anybatch.core import Batch, Total, torch_private as private
from anybatch.engine import Plan, check_parts, gather
from anybatch.losses import Terms, call_loss, module_of, resolve
from anybatch.state import plain_kernels, rng
from anybatch.trial import Outcome, RowPart, WatchedBatch

_NAME = "loss"  # of an unnamed term


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
        if _is_scalar(value):
            value = {_NAME: value}
        if not isinstance(value, Mapping):
            return value
        named = cast("Mapping[str, Any]", value)
        bare = {name for name, one in named.items() if _is_scalar(one)}
        self.bare |= bare
        return {name: Total(one, 1) if name in bare else one for name, one in named.items()}


def observe(loss: Any) -> Any:
    """Wrap a function of the caller's; return any other loss unchanged."""
    resolved = resolve(loss)
    return replace(resolved, function=Observed(resolved.function)) if isinstance(resolved, Terms) else loss


def bare_terms(loss: Any) -> frozenset[str]:
    """Return the terms for which an observed loss returned bare means."""
    function = loss.function if isinstance(loss, Terms) else None
    return function.bare if isinstance(function, Observed) else frozenset()


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


Key = tuple[str, int]  # a module's name, and the number of the call


class Call:
    """One call of a module."""

    def __init__(self, *, key: Key, values: list[Any], form: Any, state: rng.RandomState) -> None:
        self.key = key  # the module, and the number of its call in this micro-batch
        self.values, self.form = values, form  # the arguments, flattened, and their tree
        self.state = state  # of the random streams
        self.outputs: list[Tensor] = []
        self.inner: list[Call] = []  # calls inside this one, in the order of their ends

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [value for value in self.values if isinstance(value, Tensor)]

    def repeat(self, module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call a module in the same way, with these tensors in place of its own."""
        rest = iter(inputs)
        values = [next(rest) if isinstance(value, Tensor) else value for value in self.values]
        args, kwargs = private.pytree.tree_unflatten(values, self.form)
        return tensors(module(*args, **kwargs))

    def flat(self) -> "Iterator[Call]":
        """Yield all calls inside this one, then itself."""
        for call in self.inner:
            yield from call.flat()
        yield self


class Calls:
    """Hooks that record the calls of modules: for each part of a batch those of its last forward."""

    def __init__(self) -> None:
        self.parts: dict[RowPart, list[Call]] = {}  # outermost calls in order
        self._open: list[Call] = []
        self._counts: dict[str, int] = {}
        self._outermost: list[Call] = []

    def __deepcopy__(self, memo: object) -> "Calls":
        """Return itself: a loss may copy the model, hooks included."""
        return self

    def watch(self, model: nn.Module) -> None:
        """Register the hooks on a model."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after)

    def table(self, part: RowPart) -> dict[Key, Call]:
        """Return all calls of a part by their key, innermost first."""
        return {call.key: call for outer in self.parts.get(part, []) for call in outer.flat()}

    def begin(self, part: RowPart) -> None:
        """Begin a micro-batch of these rows."""
        self._open, self._counts, self._outermost = [], {}, []
        self.parts[part] = self._outermost

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if private.is_in_backward():  # recomputed calls are known
                return
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            values, form = private.pytree.tree_flatten((args, kwargs))
            kept = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
            self._open.append(Call(key=(name, count), values=kept, form=form, state=rng.capture()))

        return hook

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        if private.is_in_backward():
            return
        call = self._open.pop()
        call.outputs.extend(value.detach().clone() for value in tensors(outputs))
        (self._open[-1].inner if self._open else self._outermost).append(call)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of any nested value."""
    return [leaf for leaf in private.pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


# (`module (Class)`, dotted name) -> value of a buffer in the state dict.
State = dict[tuple[str, str], Tensor]


def state_of(model: nn.Module, loss: nn.Module) -> State:
    """Return the saved buffers of a model and its loss, each once; those of the loss under `loss.`."""
    found, known = State(), set[nn.Module]()
    for root, prefix in ((model, ""), (loss, "loss.")):
        saved = root.state_dict(keep_vars=True)
        for name, module in root.named_modules():
            for key, value in () if module in known else module.named_buffers(recurse=False):
                path = f"{name}.{key}".strip(".")
                if saved.get(path) is value and value.layout == torch.strided and not value.is_meta:
                    found[culprit_of(prefix + name, module), prefix + path] = value.detach()
            known.add(module)
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
        self.gradients = {
            name: (g.to_dense() if g.is_sparse else g).clone() for name, g in found.items() if g is not None
        }


class Pass(Outcome):
    """One pass over some rows in one split, with the calls of modules and the state that it leaves."""

    def __init__(self, bench: "Bench", cut: RowCut, batch: Batch, model: nn.Module, loss: Any) -> None:
        self.failure: Exception | None = None  # that ended the pass
        self.cut, self.words = cut, cut.words
        self.error = self.loss_error = math.inf  # relative to a reference, once compared
        self.calls, self.state = Calls(), State()
        self._bench, self._held = bench, (model, module_of(loss))
        self.calls.watch(model)
        watched: Any = WatchedBatch(batch, cut.part, bench.draws, self._begin)
        sizes = tuple([len(part.rows) for part in cut.parts])
        try:
            plan = Plan(rows=batch.rows, micro_batch=max(sizes), batch_norm=bench.batch_norm)
            optimizers, _ = check_parts(model, loss, Recorder(bench.subject.named), None)
            task = gather(model, loss, optimizers, ())
            super().__init__(task, watched, plan, sizes, bench.draws, is_dry=False)
        except Exception as error:  # the user's code may raise anything
            self.failure = error
        finally:
            bench.draws.is_watching = True
            del self._held
        # Draws of the last micro-batch that were not replayed, and terms returned as bare means.
        self.unreplayed, self.bare = bench.draws.unreplayed, bare_terms(loss)

    def _begin(self, part: RowPart) -> None:
        self._bench.draws.begin(part)
        self.calls.begin(part)

    def holds(self, limit: float) -> bool:
        """Return True if both errors are at most the limit."""
        return self.error <= limit and self.loss_error <= limit

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradient and the state."""
        super().gradients(gradients)
        self.state = state_of(*self._held)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """A place for passes: all on the same model, from the same random state."""

    subject: Subject
    draws: Draws
    batch_norm: Any = "micro"  # as for `anybatch.Step`

    @contextmanager
    def fresh(self) -> Generator[tuple[nn.Module, Any]]:
        """Yield model and loss for one pass; draws are replayed inside."""
        default = torch.get_default_dtype()
        if self.subject.dtype is not None:
            torch.set_default_dtype(self.subject.dtype)  # of tensors that the model makes: states, masks
        try:
            with self.subject.fresh(), torch.enable_grad(), plain_kernels(), self.draws:
                yield self.subject.model, observe(self.subject.loss)
        finally:
            torch.set_default_dtype(default)

    def run(self, cut: RowCut) -> Pass:
        """Make a pass."""
        batch = cut.batch(self.subject.dtype)
        with self.fresh() as (model, loss):
            return Pass(self, cut, batch, model, loss)
