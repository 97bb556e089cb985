"""Windows with a budget of memory; what they hold, and what lies there beside them, counts."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Options, Step
from anybatch.core.errors import BudgetError
from tests.budgets import Meeting, metered
from tests.options import flat

WIDTH = 400  # the weight takes eight rows' worth of input


def layer(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Sigmoid(), *more)


def rows_of(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 50, WIDTH)
    return x, x.sin()


def with_layer(model: nn.Module, memory: int | None, **options: Any) -> Step:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return Step(model, nn.MSELoss(), optimizer, memory=memory, **flat(options, check=False))


def peak_of_window(step: Step, batch: Any, sizes: Any) -> int:
    """Of the third window, when every size has been read; only the largest part counts."""

    def run() -> None:
        with step.window() as window:
            for micro in zip(*(leaf.split(sizes) for leaf in batch), strict=True):
                window.add(micro)

    run()
    run()
    others = 1 - max(sizes) / sum(sizes)
    return metered(step, run, batch) - int(others * sum(leaf.nbytes for leaf in batch))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((8, 8), {}),
        ((13, 3), {}),
        ((6, 6, 6), {"accumulate": torch.float64}),
        ((3, 13), {"non_finite": "drop"}),
    ],
    ids=str,
)
def test_a_window_keeps_to_its_budget(
    sizes: tuple[int, ...], options: dict[str, Any], made: list[Any]
) -> None:
    """A whole batch has no sums beside its gradients, a window has."""
    batch = rows_of(sum(sizes))

    def peak(memory: int | None) -> int:
        return peak_of_window(with_layer(layer(), memory, **options), batch, sizes)

    with pytest.raises(BudgetError, match="By readings") as refused:
        with_layer(layer(), 3_500_000, **options).window().add(rows_of(max(sizes)))
    least = refused.value.smallest
    assert least < (1.4 if "accumulate" in options else 0.9) * peak(None)
    for memory in (least, 3 * least // 2):
        assert 0.5 * memory < peak(memory) <= memory
    assert not made


def test_a_window_whose_result_depends_on_the_cut_is_cut_only_if_need_be() -> None:
    def cut(memory: int) -> tuple[int, ...]:
        model = Meeting()
        options = Options(batch_norm="micro", check=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = Step(model, nn.CrossEntropyLoss(), optimizer, memory=memory, options=options)
        window = step.window()
        window.add((torch.randn(8, 8, 64, 16), torch.randint(2, (8,))))
        return window.close().cut

    assert cut(2**30) == (8,)
    gc.collect()  # what is freed within a reading makes its peak smaller
    with pytest.raises(BudgetError) as refused:
        cut(700_000)
    assert cut(refused.value.smallest) == (2,) * 4


def test_gradients_that_are_there_count_also_of_parameters_that_are_not_trained() -> None:
    batch = rows_of(8)
    net = layer(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False))

    def peak(memory: int) -> int:
        step = with_layer(net, memory)
        for _ in range(2):
            step(batch)
        return metered(step, lambda: step(batch), batch)

    smallest: list[int] = []
    for given in (None, torch.ones(WIDTH, WIDTH)):
        net[0].weight.grad = net[-1].weight.grad = given
        with pytest.raises(BudgetError) as refused:
            peak(3_400_000 if given is None else 6_000_000)
        smallest.append(refused.value.smallest)
        assert peak(smallest[-1]) <= smallest[-1]
        assert net[-1].weight.grad is given
    assert smallest[1] - smallest[0] >= 2 * net[0].weight.nbytes
