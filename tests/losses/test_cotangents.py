import pytest
import torch

from anybatch.core.errors import LossError
from anybatch.losses.cotangents import Pull


def pull() -> Pull:
    parameter = torch.zeros(2)
    return Pull(
        value=torch.tensor(7.0),
        weight=5,
        rows=5,
        outputs=(torch.arange(5.0), torch.tensor(2.0), torch.arange(5)),
        cotangents=(torch.arange(5.0) * 10, torch.tensor(3.0), None),
        parameters=((parameter.requires_grad_(), torch.tensor([1.0, 4.0])),),
    )


def test_shares_add_up_to_the_loss_and_its_gradient() -> None:
    given = pull()
    parameter, _ = given.parameters[0]
    output, scalar = torch.arange(5.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    value = torch.zeros(())
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        outputs = [output[start:stop], scalar * 1, torch.arange(start, stop)]
        given.check(outputs, start, stop)
        share = given.into(outputs, start, stop)
        share.backward()
        value += share.detach()
    assert value == 7
    assert torch.equal(output.grad, torch.arange(5.0) * 10)
    assert scalar.grad == 3  # once, not three times
    assert torch.equal(parameter.grad, torch.tensor([1.0, 4.0]))


def test_the_cotangent_that_comes_in_scales_all() -> None:
    output = torch.arange(5.0, requires_grad=True)
    share = pull().into([output[:2], torch.tensor(2.0), torch.arange(2)], 0, 2)
    share.backward(torch.tensor(0.5))
    assert torch.equal(output.grad, torch.tensor([0.0, 5, 0, 0, 0]))


def test_nothing_to_send_carries_no_graph() -> None:
    assert not pull().into([torch.zeros(2), torch.tensor(2.0), torch.arange(2)], 2, 4).requires_grad


def test_another_second_pass_is_refused_with_the_last_rows() -> None:
    given = pull()
    given.check([torch.tensor([0.0, 9.0]), torch.tensor(2.0), torch.arange(2)], 0, 2)
    with pytest.raises(LossError, match="repeat the first"):
        given.check([torch.arange(2.0, 5.0), torch.tensor(2.0), torch.arange(2, 5)], 2, 5)


def test_rounding_is_no_difference() -> None:
    given = pull()
    given.check([torch.arange(5.0) * (1 + 1e-6), torch.tensor(2.0), torch.arange(5)], 0, 5)


def test_other_shapes_are_refused_at_once() -> None:
    with pytest.raises(LossError, match="shapes"):
        pull().check([torch.zeros(1), torch.tensor(2.0), torch.arange(1)], 0, 2)
