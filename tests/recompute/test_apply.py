"""Policies change nothing but memory: loss, gradients, buffers and random streams to the bit."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.recompute import POLICIES, Choice, apply_policies, find_blocks, offload as offload_module
from anybatch.recompute.selective import contexts
from anybatch.testing import GradientRecorder
from tests import device
from tests.device import needs_cpu
from tests.integrations.heads import HEADS
from tests.recompute.models import MODELS, every, make, run, seed, streams
from tests.snapshots import changes, same
from tests.zoo import Made

policies = pytest.mark.parametrize("policy", POLICIES)
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}

# What transformers says about configs as tiny as these is about nothing that matters here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*weights are not part of single contiguous chunk"),
]


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "SMALLEST", 0)


@pytest.mark.parametrize("policy", [*POLICIES, "mixed", "whole"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*[(name, "float32") for name in MODELS], *[("odd", how) for how in ("two passes", "autocast", *DTYPES)]],
)
def test_nothing_changes(name: str, policy: str, how: str) -> None:
    model, x = make(name, DTYPES.get(how, torch.float32))
    choice = every(model, policy)
    if policy == "mixed":  # beside each other
        choice = tuple(zip(find_blocks(model), (*POLICIES, "recompute"), strict=False))
    if policy == "whole":  # the model is one block
        choice = (("", POLICIES[0]),)
    options: dict[str, Any] = {"passes": 2 if how == "two passes" else 1}
    if how == "autocast":
        options["context"] = partial(torch.autocast, device.KIND, torch.bfloat16)
    assert changes(run(model, x, (), **options), run(model, x, choice, **options)) == []


HEAD = {head.name: head for head in HEADS}

GPT2 = HEAD["GPT2LMHeadModel"]
OF_TRANSFORMERS = {
    "T5": HEAD["T5ForConditionalGeneration"],
    "Mixtral": HEAD["MixtralForCausalLM"],
    "GPT2, with a cache": replace(GPT2, settings={**GPT2.settings, "n_layer": 3, "use_cache": True}),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("chosen", [slice(None), slice(1, 2)], ids=["all", "one"])
@policies
def test_nothing_changes_in_a_step_of_transformers(name: str, chosen: slice, policy: str) -> None:
    head = OF_TRANSFORMERS[name]

    def step(choice: Choice) -> dict[str, Any]:
        model = head.build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        recorder = GradientRecorder(model)
        seed(1)
        with apply_policies(model, choice):
            report = ab.Step(model, ab.ModelLoss(), recorder, micro_batch=3)(head.batch)
        return {"loss": report.loss, **streams(), **recorder.gradients}

    choice = every(head.build(), policy)
    assert choice
    assert changes(step(()), step(choice[chosen])) == []


class Failure(TorchDispatchMode):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # allocates nothing
            return func(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


@policies
@pytest.mark.parametrize("name", ["odd", "resnet"])
def test_running_out_of_memory_anywhere_leaves_no_trace(name: str, policy: str) -> None:
    for at in itertools.count(17, 53):
        broken, x = make(name)
        seed(3)
        with torch.no_grad():
            broken(x)  # what a forward leaves is there from now on
        attributes = [set(vars(module)) for module in broken.modules()]
        before: list[Any] = []
        with suppress(torch.OutOfMemoryError), apply_policies(broken, every(broken, policy)), Failure(at):
            loss = broken(x).square().mean()
            before = [*[b.detach().clone() for b in broken.buffers()], streams()]
            loss.backward()
            break
        assert [set(vars(module)) for module in broken.modules()] == attributes
        if before:
            assert same(before, [*broken.buffers(), streams()])
    assert at > 10 * 17


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@policies
@pytest.mark.parametrize("name", ["encoder", "unet"])
def test_compiled_blocks(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the compiler's progress bar would leave a thread
    found: list[list[Tensor]] = []
    model, x = make(name)
    blocks = find_blocks(model)
    for block in blocks:
        model.get_submodule(block).compile(backend="aot_eager")
    for choice in ((), tuple((block, policy) for block in blocks)):
        torch._dynamo.reset()
        seed(3)
        with apply_policies(model, choice):
            loss = model(x).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients, streams()["torch"]])
    torch._dynamo.reset()
    assert same(*found)


def test_a_compiled_model_is_refused() -> None:
    model: Any = torch.compile(make("encoder")[0], backend="eager")
    entered = apply_policies(model, every(model, "recompute"))
    with pytest.raises(PlanError, match=r"Compile the blocks.*block.compile\(\)"), entered:
        pass


@pytest.mark.parametrize(("forward", "shapes", "kept", "again"), [
    (torch.matmul, ((3, 4), (4, 5)), "mm", 2),  # those of the gradients
    (torch.conv2d, ((1, 2, 4, 4), (3, 2, 3, 3)), "convolution", 0),
    pytest.param(scaled_dot_product_attention, ((1, 2, 4, 8),) * 3, "attention", 0, marks=needs_cpu),
])  # fmt: skip
def test_selective_keeps_products_convolutions_and_attention(
    forward: Any, shapes: Any, kept: str, again: int
) -> None:
    ran = list[str]()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    block = lambda *given: forward(*given).tanh().exp()  # noqa: E731
    loss = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts).sum()
    with Names():
        loss.backward()
    assert sum(kept in name and "backward" not in name for name in ran) == again
    assert ran.count("tanh") == 1


WIDTH, LENGTH = 8, 5


def function(of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a linear layer in front of a function."""
    return Made(lambda self, x: of(self.linear(x)), linear=nn.Linear(WIDTH, WIDTH))


def first(inner: nn.Module, given: int = 1) -> nn.Module:
    """Return the first output of a module that has several; attention is given its arguments thrice."""
    return Made(lambda self, x: self.inner(*[x] * given)[0], inner=inner)


def add_to_chunk(y: Tensor) -> Tensor:
    left, right = y.unsafe_chunk(2, -1)
    return left.add_(right).sin()


def add_to_view(y: Tensor) -> Tensor:
    y[..., :2] += 1
    return y.tanh()


def attend(dropout: float) -> Callable[[Tensor], Tensor]:
    return lambda y: F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=dropout)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: first(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "GRU of two layers": lambda: first(nn.GRU(WIDTH, WIDTH, 2, dropout=0.3, bidirectional=True)),
    "LSTM": lambda: first(nn.LSTM(WIDTH, WIDTH, bidirectional=True)),
    "RNN": lambda: first(nn.RNN(WIDTH, WIDTH, 2, dropout=0.3, nonlinearity="relu")),
    "attention": lambda: function(attend(0.0)),
    "attention with dropout": lambda: function(attend(0.3)),
    "heads with dropout": lambda: first(nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True), 3),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(True), nn.Dropout(0.3)),
    "RReLU in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(inplace=True)),
    "convolution in place": lambda: nn.Sequential(nn.Conv1d(LENGTH, 4, 3), nn.SiLU(inplace=True)),
    "chunk and add": lambda: function(add_to_chunk),
    "view and add": lambda: function(add_to_view),
    "rows of a view": lambda: function(lambda y: y.view(-1, 4).mul_(2).view_as(y).sigmoid()),
    "transposed": lambda: function(lambda y: (y.transpose(1, 2) @ y).add_(1).softmax(-1)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_many_kinds_have_the_same_bits(kind: str, policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MODULES[kind]())
    x = torch.randn(4, LENGTH, WIDTH)
    assert changes(run(model, x, ()), run(model, x, (("1", policy),))) == []
