"""Any function of a batch as a loss over all rows: only the modules that it calls are cut."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from anybatch.core import LossError, loaded, tree
from anybatch.homes.entries import replaced
from anybatch.losses import WholeBatch
from anybatch.state import ModuleState, ObjectState, Snapshot, rng


class SplitLoss:
    """A loss in two parts: the modules with parameters that it calls, and its other code.

    `evaluate` takes rows, calls parts of `module` and returns the loss; with `keeps=False` it is not used. An
    output that is a mapping is kept without other `keys`, if it has one of these. Losses in it
    are None.
    """

    def __init__(self, module: nn.Module, evaluate: Callable[..., Any], keys: Sequence[str] = ()) -> None:
        self._module, self._evaluate, self._keys = module, evaluate, keys
        self._losses = set[nn.Module]()  # modules that return a scalar

    def whole(self) -> WholeBatch:
        """Return the loss over the outputs of all rows."""
        return WholeBatch(self._loss, outputs=self._outputs)

    def _outputs(self, model: nn.Module, micro: Any) -> Any:
        """Return the output of each call, and the rows."""
        torchmetrics = loaded("torchmetrics")
        parts = self._module.modules() if torchmetrics else ()
        metrics = [one for one in parts if isinstance(one, torchmetrics.Metric)]
        before = ObjectState(metrics, but_for=()) if metrics else None
        streams, own = rng.capture(rng.of_process()), Snapshot(ModuleState(self._beside()))
        called = set[nn.Module]()
        while True:
            found, known = list[Any](), len(self._losses)

            def note(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                called.add(module)
                output = forward(*args, **kwargs)
                kept = output
                if isinstance(output, Tensor) and not output.dim():
                    self._losses.add(module)
                if isinstance(output, Mapping):  # without losses of these rows alone
                    kept = {key: output[key] for key in self._keys if key in output} or output
                    parts = [None if str(key).endswith("loss") else one for key, one in kept.items()]
                    kept = tree.mould(kept)(parts)
                found.append(kept)  # noqa: B023
                return output

            with self._answered(note):  # on copies of mappings, because a module may add keys
                self._evaluate(tree.map_leaves(lambda leaf: leaf, micro), keeps=False)
            if before is not None:  # metrics count all rows at once
                before.put_back()
            if self._module not in called:  # so do counters and running scales of the other code
                own.put_modules_back()
            if len(self._losses) == known:
                return tuple(found), micro
            rng.restore(streams)  # once more: modules inside of a loss are answered instead

    def _beside(self) -> list[nn.Module]:
        """Return the module itself, and those that run with its other code: they have no parameters."""
        children = [one for one in self._module.children() if next(one.parameters(), None) is None]
        return [self._module, *[one for child in children for one in child.modules()]]

    def _loss(self, outputs: Sequence[Any], rows: Any) -> Tensor:
        """Return the loss of all rows."""
        left, streams = [*outputs], rng.capture(rng.of_process())

        def answer(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return left.pop(0) if left else forward(*args, **kwargs)

        with self._answered(answer):
            loss = self._evaluate(rows, keeps=True)
        if left or not rng.is_same(streams, rng.capture(rng.of_process())):
            what = f"{len(left)} calls less" if left else "random numbers drawn outside of modules"
            raise LossError(
                f"Expected {type(self._module).__name__} to call the same modules for all rows as for a few, "
                f"and to draw random numbers only in them, got {what}. Draw in a module or the data loader."
            )
        return loss

    def _answered(self, answer: Callable[..., Any]) -> AbstractContextManager[None]:
        """Answer the outermost calls of modules that have parameters and do not return a scalar."""
        is_inside = False

        def routed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or module in self._losses:
                return forward(*args, **kwargs)
            is_inside = True
            try:
                return answer(module, forward, *args, **kwargs)
            finally:
                is_inside = False

        modules = [one for one in self._module.modules() if next(one.parameters(), None) is not None]
        return replaced(*[(one, "forward", partial(routed, one, one.forward)) for one in modules])
