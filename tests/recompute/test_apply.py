"""Policies change nothing but memory: loss, gradients, buffers and random streams to the bit."""

import gc
import itertools
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch as ab
from anybatch.core.errors import PlanError
from anybatch.memory.meter import Meter
from anybatch.recompute import POLICIES, Choice, apply_policies, find_blocks, offload as offload_module
from anybatch.testing import GradientRecorder
from tests import device
from tests.integrations.heads import HEADS, Head
from tests.recompute.models import MODELS, every, make, run, seed, streams
from tests.snapshots import changes, same
from tests.zoo import Made

policies = pytest.mark.parametrize("policy", POLICIES)
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}

# What transformers says about configs as tiny as these is about nothing that matters here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


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
LFM2 = {
    "vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "pad_token_id": 0,
    "intermediate_size": 32, "max_position_embeddings": 64, "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip
GPT2 = HEAD["GPT2LMHeadModel"]
OF_TRANSFORMERS = {
    "T5": HEAD["T5ForConditionalGeneration"],
    "Mixtral": HEAD["MixtralForCausalLM"],
    "GPT2, with a cache": replace(GPT2, settings={**GPT2.settings, "n_layer": 3, "use_cache": True}),
    "LFM2, with a cache": Head(name="Lfm2ForCausalLM", settings=LFM2, batch=GPT2.batch),
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


def clip(one: Tensor, other: Tensor) -> Tensor:
    return nn.functional.cross_entropy(one.flatten(1) @ other.flatten(1).T, torch.arange(len(one)))


def several(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    one, other = model(micro[0])
    return {"a": ab.Total(one.square().sum(), len(one)), "b": ab.Total(other.exp().sum(), other.numel())}


@policies
@pytest.mark.parametrize("kind", ["whole batch", "terms, late", "window"])
def test_nothing_changes_in_a_step(policy: str, kind: str) -> None:
    def step(*, is_kept: bool) -> dict[str, Any]:
        inner, loss = make("encoder")[0], ab.WholeBatch(clip) if kind == "whole batch" else ab.Terms(several)
        model = Made(lambda self, x: (self.encoder(x), self.encoder(x.flip(1))), encoder=inner)
        x, recorder = torch.randn(6, 5, 8), GradientRecorder(model)
        step = ab.Step(model, loss, recorder, micro_batch=2, options=ab.Options(check=False))
        with apply_policies(model, () if is_kept else every(model, policy)):
            if kind == "window":
                with step.window() as window:
                    for micro in x.split(2):
                        window.add((micro,))
            else:
                step((x,))
        return {"stream": torch.get_rng_state(), **recorder.gradients}

    plain = step(is_kept=True)
    assert len(plain) > 1
    assert changes(plain, step(is_kept=False)) == []


@policies
def test_gradients_of_some_inputs_only(policy: str) -> None:
    found: list[Tensor | None] = []
    for chosen in (False, True):
        model, x = make("encoder")
        weight = next(model.parameters())
        with apply_policies(model, every(model, policy) if chosen else ()):
            seed(1)
            model(x).square().sum().backward(inputs=[weight])
        assert all((p.grad is None) == (p is not weight) for p in model.parameters())
        found.append(weight.grad)
    assert same(*found)


@policies
def test_hooks_of_a_block_run_once(policy: str) -> None:
    (model, x), ran = make("encoder"), list[str]()
    block = model.get_submodule("layers.1")
    block.register_forward_pre_hook(lambda *_: ran.append("before"))
    block.register_forward_hook(lambda *_: ran.append("after"))
    block.register_full_backward_hook(lambda *_: ran.append("backward"))
    with apply_policies(model, every(model, policy)):
        model(x).sum().backward()
    assert ran == ["before", "after", "backward"]


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


@policies
def test_the_model_is_as_before(policy: str) -> None:
    model, _ = make("odd")
    model.blocks[0].forward = partial(type(model.blocks[0]).forward, model.blocks[0])
    before = [vars(module).copy() for module in model.modules()]
    for _ in range(2):
        with suppress(KeyError), apply_policies(model, every(model, policy)):
            assert all("forward" in vars(model.get_submodule(name)) for name in find_blocks(model))
            raise KeyError
        assert [vars(module) for module in model.modules()] == before


@policies
def test_nothing_is_held_after_a_step(policy: str) -> None:
    model, x = make("encoder")
    with apply_policies(model, every(model, policy)):
        model(x).sum().backward()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        with apply_policies(model, every(model, policy)):
            model(x).sum().backward()
    gc.collect()
    assert len(gc.get_objects()) - before < 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@policies
@pytest.mark.parametrize("name", ["encoder", "unet", "resnet"])
@pytest.mark.parametrize("how", ["block.compile", "torch.compile"])
def test_compiled_blocks(name: str, policy: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the compiler's progress bar would leave a thread
    found: list[list[Tensor]] = []
    model, x = make(name)
    blocks = find_blocks(model)
    for block in blocks:
        if how == "block.compile":
            model.get_submodule(block).compile(backend="aot_eager")
        else:
            model.set_submodule(block, torch.compile(model.get_submodule(block), backend="aot_eager"))
    before = [b.clone() for b in model.buffers()]
    for choice in ((), tuple((block, policy) for block in blocks)):
        torch._dynamo.reset()
        seed(3)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        with apply_policies(model, choice):
            loss = model(x).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients, *[b.clone() for b in model.buffers()], streams()["torch"]])
    torch._dynamo.reset()
    assert same(*found)


@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_a_compiled_model_is_refused(how: str) -> None:
    model: Any = make("encoder")[0]
    if how == "compile":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    entered = apply_policies(model, every(model, "recompute"))
    with pytest.raises(PlanError, match=r"Compile the blocks.*block.compile\(\)"), entered:
        pass


NOTHING = "'layers.0.nothing': TransformerEncoderLayer has no 'nothing'"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ((("layers.0.nothing", "recompute"),), NOTHING),
        ((("layers.0", "recompute"), ("layers", "forget")), "got 'forget'"),
    ],
)
def test_what_cannot_be_applied_is_refused(choice: Choice, message: str) -> None:
    model, _ = make("encoder")
    with pytest.raises(PlanError, match=message), apply_policies(model, choice):
        pass
    assert not any("forward" in vars(module) for module in model.modules())


def test_less_is_held() -> None:
    model, x = make("encoder")
    x = x.repeat(8, 8, 1)

    def peak(choice: Choice) -> int:
        with Meter(model, batch_leaves=[x]) as meter, apply_policies(model, choice):
            model(x).square().mean().backward()
        model.zero_grad()
        return meter.peak - meter.held

    kept, rebuilt = peak(()), peak(every(model, "recompute"))
    assert rebuilt < 0.6 * kept
    assert rebuilt < peak(every(model, "selective")) < kept
