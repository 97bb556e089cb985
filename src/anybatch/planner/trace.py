"""A step run on fake tensors: all of its bytes, without memory."""

import threading
from collections.abc import Callable, Iterable, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from anybatch import memory
from anybatch.core import Batch, SampleBatch, TensorBatch, tensors_in, torch_private as private, tree
from anybatch.engine import Plan, Task, carry_out, owned
from anybatch.integrations import homes, wants_router_loss
from anybatch.losses import Additive, Loss, ModelTerms, SummedLoss, Terms
from anybatch.planner.request import computes_in_half
from anybatch.state import Effects, ObjectState

_ONE_AT_A_TIME = threading.RLock()


def run_sizes(plan: Plan, loss: Loss, model: nn.Module) -> tuple[int, ...]:
    """Return the rows of the micro-batches to run: two of many alike that keep almost nothing once done."""
    # A first pass keeps outputs of all rows, and a router's loss their scores.
    is_one_pass = isinstance(loss, SummedLoss | Terms | Additive | ModelTerms)
    if isinstance(loss, ModelTerms):
        is_one_pass = not (homes(model) and wants_router_loss(model))
    return plan.sizes[:2] if is_one_pass and not plan.cut else plan.sizes


def fake_batch(batch: Batch, rows: int, traced: int, loss: Loss) -> tuple[Batch, list[Tensor]]:
    """Return a batch of fakes, and its leaves that exist from the start."""
    if batch.whole is None:
        return _collated(batch, traced), []
    nest = tree.flatten(batch.whole)
    bases: dict[int, Tensor] = {}  # leaves may be views of one tensor
    leaves = [_of_rows(leaf, rows, bases) for leaf in nest.leaves]
    full = TensorBatch(nest.build(iter(leaves)))
    if traced == rows:
        return full, leaves
    head = full.only(range(traced))
    if isinstance(loss, SummedLoss):  # takes weights from the whole batch; others count the rows that run
        head.given = head.whole = full.whole
    return head, leaves


def _of_rows(leaf: Tensor, rows: int, bases: dict[int, Tensor]) -> Tensor:
    """Return a fake like a leaf of the batch, with another number of rows, stored row after row."""
    step, *inner = leaf.stride()
    storage, host = leaf.untyped_storage(), "cpu" if leaf.is_meta else leaf.device
    if step < max(inner, default=1):  # the axis of rows is not the outermost in memory
        fake = torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=host)
    else:
        base = bases.get(id(storage))
        if base is None:
            base = torch.empty(rows * step, dtype=leaf.dtype, device=host)
            bases[id(storage)] = base
        fake = base.as_strided((rows, *leaf.shape[1:]), leaf.stride(), leaf.storage_offset() % step)
    return fake.requires_grad_(leaf.requires_grad)


def _collated(batch: Batch, rows: int) -> Batch:
    head = batch.only(range(min(batch.rows, rows)))
    nest = tree.flatten(next(head.cut(head.rows)))

    def collate(samples: list[Any]) -> Any:
        leaves = [
            _of_rows(leaf, len(samples), {}) if leaf.dim() and len(leaf) == head.rows else leaf
            for leaf in nest.leaves
        ]
        return nest.build(iter(leaves))

    return SampleBatch([batch.given[row % batch.rows] for row in range(rows)], collate)


_LATE = 1000.0  # the step count set by `advance`


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The bytes and the seconds of one step."""

    plan: Plan
    ledger: memory.Ledger  # bytes by owner, module and moment
    seconds: float  # of one update, estimated from the device's figures
    idle: frozenset[nn.Parameter] = frozenset()  # parameters without gradient, so without state
    attention: frozenset[str] = frozenset()  # the kernels of a card that attention was taken to use

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return self.ledger.peak


def trace(
    plan: Plan,
    task: Task,
    batch: Batch,
    *,
    device: memory.Device,
    idle: Set[nn.Parameter] = frozenset(),
) -> Trace:
    """Run one step on fake tensors, with the optimizer's state of the second step; restore everything.

    Of many micro-batches of one size only two are run, if both call the model as often. A device of another
    machine is approximated: sizes are rounded up as its allocator does, optimizers update all parameters at
    once (foreach) as they would there, attention and dropout keep what they keep there, autocast casts as
    there, and the other kernels are the CPU's. cuBLAS's workspaces count from the start.
    """
    sizes = run_sizes(plan, task.loss, task.model)
    reduced = replace(plan, rows=sum(sizes)) if len(sizes) < plan.micro_batches else plan
    parameters, kernels = [*task.network.parameters, *task.network.others], set[str]()
    collate = (batch.collate,) if isinstance(batch, SampleBatch) else ()
    roots = [task.model, task.loss, *task.network.modules, *task.optimizers, *collate]
    with (
        _ONE_AT_A_TIME,  # `drop_left_fakes` acts on all threads
        private.disable_current_modes(),  # hides the trace from a meter around it
        memory.undisturbed(parameters, roots) as snapshot,
    ):
        settled: Any = {"rows": plan.rows, "task": task, "batch": batch, "device": device}
        run = partial(run_on_fakes, **settled, snapshot=snapshot, kernels=kernels)
        known = task.effects.buffers
        recording, found, wrongly = run(reduced, idle=idle)
        if reduced is not plan and (not recording.forwards or recording.forwards % len(sizes)):
            reduced = plan  # micro-batches differ
            recording, found, wrongly = run(plan, idle=idle)
        if wrongly or task.effects.buffers != known:
            recording, found, _ = run(reduced, idle=found)
        snapshot.put_back()
        memory.drop_left_fakes()
    if reduced is not plan:
        recording = memory.continued(recording, plan.micro_batches)
    ledger = recording.ledger(source="predicted", device=device.kind)
    attention = frozenset(kernels)
    seconds = device.seconds(*recording.work, half=plan.precision.is_short or computes_in_half(task))
    return Trace(plan=plan, ledger=ledger, seconds=seconds, idle=found, attention=attention)


def run_on_fakes(
    plan: Plan,
    *,
    rows: int,
    task: Task,
    batch: Batch,
    device: memory.Device,
    snapshot: ObjectState,
    kernels: set[str],
    idle: Set[nn.Parameter],
) -> tuple[memory.Recording, frozenset[nn.Parameter], bool]:
    """Return (recording, parameters without gradient, True if optimizer state was made for one of them).

    Add the kernels of attention to `kernels`.
    """
    snapshot.put_back()  # tensors kept by an earlier run would count in this one
    mode, is_card, model = memory.FakeMode(), device.kind != "cpu", {*task.model.modules()}
    modules = [*dict.fromkeys((*task.network.modules, *snapshot.modules))]

    def note(optimizer: Optimizer, *_: object) -> None:
        updated.update(p for p in owned([optimizer]) if p.grad is not None)

    with memory.replaced_by_fakes(mode, modules, task.optimizers) as fakes:
        fake = faked(task, fakes)
        twins = {one: fakes.of(one) for one in (*task.network.parameters, *task.network.others)}
        own = [one for slots in task.network.state.buffers for one in slots.values() if one is not None]
        buffers = [(one, fakes.of(one), private.version(fakes.of(one))) for one in own if not is_lazy(one)]
        lacks = {fakes.of(parameter) for parameter in idle}
        del fakes  # frees tensors that a forward may replace
        updated: set[Tensor] = set()
        with mode.explained(), mode:
            logical, leaves = fake_batch(batch, rows, plan.rows, task.loss)
            for group in [group for one in task.optimizers for group in one.param_groups if is_card]:
                if group.get("foreach", True) is None and not group.get("fused"):
                    group["foreach"] = True
            made = make_state(fake, lacks)
            advance(fake)
            cublas = torch.empty(device.workspace, dtype=torch.uint8, device=next(iter(fake.network.devices)))
            meter = memory.Meter(
                task.model,
                task.optimizers,
                loss_module=nn.ModuleList([one for one in task.network.modules if one not in model]),
                batch_leaves=leaves,
                state=fake.masters.tensors,
                cublas=[cublas],
                as_accelerator=is_card,
            )
            mode.where = lambda: meter.module
            del leaves
            for one in task.optimizers:
                one.register_step_pre_hook(note)
            on_card = private.kernels_before_autocast(_kernels_of(device, kernels))
            with meter, on_card if is_card else nullcontext():
                carry_out(plan, fake, logical)
        written = set(fake.effects.parameters)
        task.effects.writes([parameter for parameter, twin in twins.items() if twin in written])
        stale = mode.statistics | {id(twin) for _, twin, old in buffers if private.version(twin) != old}
        task.effects.changes([buffer for buffer, twin, _ in buffers if id(twin) in stale])
        found = frozenset(p for p in task.network.parameters if twins[p] not in updated)
        return meter.recording, found, any(twins[p] in made for p in found)


def _kernels_of(device: memory.Device, kernels: set[str]) -> dict[str, Callable[..., Any]]:
    """Return kernels that trace attention, dropout and autocast as a card computes them."""

    def attend(
        op: Any, query: Any, key: Any, value: Any, mask: Any = None, p: float = 0.0, *rest: Any, **named: Any
    ) -> Tensor:
        kind, heads = query.device.type, (query, key, value)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        is_grouped = query.shape[-3:-2] != key.shape[-3:-2]
        kernel = device.attention(dtype, query.shape[-1], mask is not None, is_grouped, p > 0)
        kernels.add(kernel)
        if kernel.startswith("fused"):
            return op(*heads, mask, 0.0, *rest, **named)
        with torch.autocast(kind, enabled=False):
            return private.attention_unfused(*[one.to(dtype) for one in heads], mask, p, *rest, **named)[0]

    def drop(operator: Any, input: Tensor, p: float, training: bool) -> Tensor:  # keeps a mask of bools
        return torch.native_dropout(input, p, training)[0] if training and p else operator(input, p, training)

    casts = {name: partial(_cast, rule) for rule, names in _CASTS.items() for name in names.split()}
    return {**casts, "scaled_dot_product_attention": attend, "dropout": drop}


# The lists of CUDA's autocast (ATen/autocast_mode.h, torch 2.13), and operations that are only in the CPU's.
_CASTS = {
    # AT_FORALL_FP32; softmax converts its input in any case, so it is here.
    "float32": "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm "
    "group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp softmax.int log_softmax.int "
    "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
    # AT_FORALL_FP32_SET_OPT_DTYPE: the input is not converted beforehand.
    "result in float32": "prod prod.dim_int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList",
    # AT_FORALL_PROMOTE
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    # CPU autocast computes these in float32.
    "as given": "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d replication_pad3d",
}
_HALVES = torch.float16, torch.bfloat16


def _cast(rule: str, operator: Any, *args: Any, **named: Any) -> Any:
    """Call an operator as CUDA's autocast does: it casts arguments, or sets the dtype of the result."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return operator(*args, **named)
    if rule == "result in float32" and tensors[0].dtype in _HALVES:
        named.setdefault("dtype", torch.float32)
    if rule == "float32" or (rule == "widest" and torch.float32 in [one.dtype for one in tensors]):
        args = tuple([one.float() if getattr(one, "dtype", None) in _HALVES else one for one in args])
    with torch.autocast(kind, enabled=False):
        return operator(*args, **named)


def faked(task: Task, fakes: memory.Fakes) -> Task:
    """Return the task on fake tensors, without callbacks."""

    def of(parameters: Iterable[Tensor]) -> list[Any]:
        return [fakes.of(parameter) for parameter in parameters]

    effects = Effects()  # with the changes known so far
    effects.changes(of(task.effects.buffers))
    effects.writes(of(task.effects.parameters))
    effects.begin(task.network.modules, looks=True)
    return replace(
        task.aside(),
        effects=effects,
        loss=fakes.within(task.loss),
        network=replace(
            task.network,
            parameters=of(task.network.parameters),
            others=of(task.network.others),
            # Fakes of meta tensors are on the CPU: autocast is switched on for kinds that compute.
            devices=task.network.devices - {torch.device("meta")} or {torch.device("cpu")},
        ),
        masters=task.masters.stand_in(fakes.of),
    )


def advance(task: Task) -> None:
    """Set step counts to a late step: some optimizers, such as RAdam, use less memory in early ones."""
    for optimizer in task.optimizers:
        for slots in optimizer.state.values():
            step = slots.get("step")
            if isinstance(step, Tensor) and not step.dim():
                slots["step"] = torch.tensor(_LATE, dtype=step.dtype, device=step.device)


def make_state(task: Task, idle: Set[Tensor]) -> set[Tensor]:
    """Make the state of the first update, if it is missing; return the parameters it was made for."""
    made: set[Tensor] = set()
    for optimizer in task.optimizers:
        trained = [p for p in owned([optimizer]) if p.requires_grad and p not in idle]
        held = tensors_in([*optimizer.state.values()])
        takes_sparse = isinstance(optimizer, torch.optim.SparseAdam) or any(one.is_sparse for one in held)
        if trained and takes_sparse:
            raise memory.sparse_refused(f"a {type(optimizer).__name__} that takes sparse ones")
        lacking = [p for p in trained if not optimizer.state.get(p)]
        if not lacking:
            continue
        before = [(p, p.grad) for p in trained]
        with task.masters.raised(trained, [optimizer]):
            for p in trained:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for p in trained:
                p.grad = None
        for p, gradient in before:
            p.grad = gradient
        made.update(p for p in lacking if optimizer.state.get(p))
    return made
