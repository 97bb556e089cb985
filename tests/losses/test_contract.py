"""What every loss keeps: any cut and any window are the whole batch, and uncut it is torch's to the bit."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anybatch import ModelLoss, Options, Step, Terms, WholeBatch
from anybatch.core import tree
from anybatch.core.errors import LossError
from anybatch.losses import call_model, split_batch, summed_loss
from anybatch.losses.linear import linear_cross_entropy
from anybatch.losses.reductions import FUNCTIONS, MODULES
from anybatch.testing import GradientRecorder, reference_step, relative_error
from tests import device
from tests.laws.cases import Problem
from tests.laws.losses import CASES as TORCH
from tests.losses.own_losses import BATCH, EXACT, WITH_PARAMETERS, Layer, Own, whole_of
from tests.losses.whole_losses import CASES, Towers, clip, images_and_texts
from tests.options import flat
from tests.zoo import Made, Perceptron

LIMIT = 1e-12  # relative, float64
X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASS = torch.tensor([0, 2, -100, 1, 1, -100, 2])

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """State every law in float64."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Variant(NamedTuple):
    """A loss, a model for it and a batch; `meets` where rows meet in the loss, which no window can have."""

    loss: Any
    model: Callable[[], nn.Module]
    batch: Any
    meets: bool = False


def inside(problem: Problem) -> nn.Module:
    """Return a model that computes torch's loss itself."""

    def forward(self: Any, *batch: Any, **named: Any) -> Tensor:
        kind = summed_loss(problem.loss).kind
        inputs, targets = split_batch(named or batch, has_target=kind.has_target)
        return problem.loss(*kind.arrange(call_model(self.model, inputs), targets))

    return Made(forward, model=problem.model)


def variants() -> Iterator[tuple[str, Variant]]:
    # Of each loss of torch the case with most options; and a sum.
    means = [case for case in TORCH if "reduction=sum" not in case.name]
    most = {re.split(r"-\w+=", case.name)[0]: case for case in means if "linear" not in case.name}
    for case in (*most.values(), *[case for case in TORCH if case.name == "cross_entropy-reduction=sum"]):
        make = partial(case.problem, [*case.forms][-1], 7)
        yield f"inside {case.name}", Variant(ModelLoss(), lambda make=make: inside(make()), make().batch)
    blocks = lambda model, micro: linear_cross_entropy(  # noqa: E731
        model(micro[0]), next(model.parameters()), micro[1].where(micro[1] > 0, -100), rows=2
    )
    yield "blocks of a tied layer", Variant(blocks, lambda: Perceptron(3, 3).double(), (X, CLASS))
    for kind, losses in ((Own, EXACT), (Layer, WITH_PARAMETERS)):
        for name, loss in losses.items():
            yield f"own {name}", Variant(ModelLoss(), partial(kind, loss), BATCH)
    for name, case in CASES.items():
        model, batch = lambda case=case: case.model(0.0).double(), in_double(case.batch(11))
        yield f"whole {name}", Variant(WholeBatch(case.function), model, batch, meets=True)
        for rows in (1, 5, 11) if case.by_rows else ():
            loss = WholeBatch(case.by_rows, loss_rows=rows)
            yield f"whole {name} by {rows}", Variant(loss, model, batch, meets=True)
    named = WholeBatch(clip, outputs=lambda model, micro: model(micro["a"], micro["b"]))
    batch = in_double(dict(zip("ab", images_and_texts(11), strict=True)))
    yield "whole clip of outputs", Variant(named, lambda: Towers().double(), batch, meets=True)


def in_double(batch: Any) -> Any:
    return tree.map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


VARIANTS = dict(variants())


def stepped(variant: Variant, **options: Any) -> tuple[Step, GradientRecorder, float, dict[str, Tensor]]:
    """A step, and what it is to give: the loss and the gradients of the whole batch at once."""
    torch.manual_seed(0)
    model = variant.model()
    recorder = GradientRecorder(model, variant.loss)
    step = Step(model, variant.loss, recorder, **flat(options))
    if isinstance(variant.loss, ModelLoss):
        return step, recorder, *whole_of(model, variant.batch)
    whole = reference_step(model, variant.loss, variant.batch)
    return step, recorder, whole.loss, dict(whole.gradients)


rows_of = lambda batch: len(tree.flatten(batch).leaves[0])  # noqa: E731


@pytest.mark.parametrize("name", VARIANTS)
def test_any_cut_is_the_whole_batch(name: str) -> None:
    variant = VARIANTS[name]
    rows = rows_of(variant.batch)
    for micro_batch in (1, 3, rows - 1):
        step, recorder, loss, gradients = stepped(variant, micro_batch=micro_batch)
        for _ in range(2):  # the second time some losses are read in another way
            report = step(variant.batch)
            assert report.micro_batches == -(-rows // micro_batch)
            assert relative_error(recorder.gradients, gradients) <= LIMIT
            assert relative_error(report.loss, loss) <= LIMIT


@pytest.mark.parametrize("name", VARIANTS)
def test_uncut_is_torch_to_the_bit(name: str) -> None:
    variant = VARIANTS[name]
    step, recorder, loss, gradients = stepped(variant)
    cut = stepped(variant, micro_batch=2)[0](variant.batch)
    for _ in range(2):
        report = step(variant.batch)
        assert recorder.gradients.keys() == gradients.keys()
        # On accelerators the weighted mean of nll_loss2d adds in any order.
        is_same = torch.allclose if "nll-dense" in name and device.KIND != "cpu" else torch.equal
        assert all(is_same(recorder.gradients[key], gradients[key]) for key in gradients)
        assert relative_error(report.loss, loss) <= LIMIT
        assert report.terms.keys() == cut.terms.keys()
        if not isinstance(variant.loss, ModelLoss | Terms):
            assert float(report.weights["loss"]) == float(cut.weights["loss"])


@pytest.mark.parametrize("name", VARIANTS)
def test_any_window_is_the_whole_batch(name: str) -> None:
    variant = VARIANTS[name]
    step, recorder, loss, gradients = stepped(variant)
    if variant.meets:
        with pytest.raises(LossError, match="Expected the whole batch"):
            step.window()
        return
    for _ in range(2):
        window = step.window()
        for start, stop in ((0, 4), (4, 5), (5, rows_of(variant.batch))):
            window.add(tree.map_leaves(lambda leaf, rows=slice(start, stop): leaf[rows], variant.batch))
        report = window.close()
        assert relative_error(recorder.gradients, gradients) <= LIMIT
        assert relative_error(math.fsum(report.terms.values()), loss) <= (
            LIMIT if len(report.terms) == 1 or not isinstance(variant.loss, Terms) else math.inf
        )


def test_every_loss_of_torch_is_in_the_laws() -> None:
    losses = {value for name, value in vars(nn).items() if name.endswith("Loss") and inspect.isclass(value)}
    assert losses - {nn.AdaptiveLogSoftmaxWithLoss} == set(MODULES)
    tried = {getattr(form, "args", [form])[0] for case in TORCH for form in case.forms.values()}
    assert tried == {*FUNCTIONS, *MODULES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_class_weights_are_summed_in_float32(dtype: torch.dtype) -> None:
    for rows in (1001, 70_001):
        target, loss = torch.zeros(rows, dtype=torch.long), nn.CrossEntropyLoss(torch.ones(1, dtype=dtype))
        model = nn.Linear(1, 1, dtype=dtype)
        step = Step(model, loss, GradientRecorder(model), micro_batch=rows - 1, options=Options(check=False))
        assert step((torch.ones(rows, 1, dtype=dtype), target)).weights == {"loss": rows}
