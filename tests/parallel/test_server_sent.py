"""Parameter servers: what is sent. Compressed pushes, rows that workers read, workers on another device."""

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import NonFiniteLossError, PlanError, tree
from anybatch.parallel import Cast, DeepGradientCompression, ParameterServer, fingerprint
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import NOT_FINITE, Layout, ServerShard
from anybatch.parallel.worker import Worker
from anybatch.testing import relative_error, tolerance
from tests.parallel.inline import Inline
from tests.parallel.test_server import EXACT, ROWS, batch, network, served, step_of

UNITS = 8


def train(
    cluster: Inline, *, optimizer: Any = torch.optim.SGD, **options: Any
) -> tuple[list[Tensor], Counter[str]]:
    """Parameters and counts after some updates."""
    server = served(cluster=cluster, **options)
    step = step_of(network(0.5), server, optimizer=optimizer, micro_batch=4)
    torch.manual_seed(7)
    for number in range(3):
        step(batch(number))
    return [p.detach().clone() for p in step.model.parameters()], server.counts


def layout(servers: int, codec: Any) -> tuple[Layout, list[nn.Parameter]]:
    parameters = [*network().parameters()]
    return Layout.of(parameters, [torch.optim.SGD(parameters, lr=1.0)], servers, None, codec), parameters


# ---- the state of the optimizer


def test_the_state_of_the_optimizer_is_where_the_next_update_is_made() -> None:
    """Also after `stop`, and where another step makes it: here, or on other servers."""

    def moved(strategies: list[Any]) -> list[Any]:
        model = network()
        made = torch.optim.Adam(model.parameters(), lr=0.01)
        steps = [
            ab.Step(model, nn.CrossEntropyLoss(), made, options=ab.Options(strategy=one))
            for one in strategies
        ]
        for number in range(8):
            steps[number % len(steps)](batch(number))
            if number == 5 and strategies[0] != "local":
                strategies[0].stop()
        return [*model.parameters(), *tree.flatten(made.state_dict()["state"]).leaves]

    allowed = tolerance(torch.float64, 8 * ROWS)
    for names in ([1], [1, "local"], [1, 2, "local"]):
        strategies = [served(n, 2, cluster=Inline(n)) if isinstance(n, int) else n for n in names]
        pairs = zip(moved(strategies), moved(["local"]), strict=True)
        assert all(relative_error({"": one}, {"": other}) < allowed for one, other in pairs)


# ---- compression


def test_servers_add_what_is_left_of_the_sums_of_each_unit() -> None:
    """In the dtype of the sums: an addition in 16 bits would show."""
    model = network()
    x, y = batch()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for start in range(UNITS):
        rows = slice(ROWS * start // UNITS, ROWS * (start + 1) // UNITS)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum")
        for name, gradient in zip(expected, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            expected[name] += gradient.bfloat16().double() / ROWS
    before = copy.deepcopy(model.state_dict())
    step_of(model, served(compression=Cast("bf16")), lr=1.0)(batch())
    found = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert relative_error(found, expected) < EXACT


@pytest.mark.parametrize("rule", [None, "accumulate"])
def test_bytes_are_counted(rule: Any) -> None:
    made, parameters = layout(2, None)
    elements, pieces = sum(p.numel() for p in parameters), sum(map(len, made.pieces))
    pushes = 3 * UNITS
    assert train(Inline(0), rule=rule)[1]["bytes pushed"] == pushes * 8 * elements
    short = train(Inline(0), rule=rule, compression=Cast("fp16"))[1]
    assert short["bytes pushed"] == pushes * (2 * elements + 4 * pieces)


def test_what_overflows_in_fp16_is_refused_and_changes_nothing() -> None:
    model = network()
    server = served(compression=Cast("fp16"))
    step = step_of(model, server, loss=nn.MSELoss(reduction="sum"))
    x, _ = batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteLossError, match=r"got NaN or infinity from unit .* No update .* 65,504"):
        step((x, torch.full((ROWS, 3), 1e5, dtype=torch.float64)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert server.counts["pushes refused"] == 1
    assert step((x, torch.zeros(ROWS, 3, dtype=torch.float64))).updated


def test_a_codec_with_a_state_is_refused_where_workers_wait_for_each_other() -> None:
    with pytest.raises(PlanError, match="without a state, got DeepGradientCompression: what waits"):
        ParameterServer(compression=DeepGradientCompression(warmup_updates=0))


def test_the_codec_refuses_optimizers_of_workers() -> None:
    codec = DeepGradientCompression(warmup_updates=0)
    with pytest.raises(PlanError, match="without momentum, got Adam"):
        train(Inline(0), optimizer=torch.optim.Adam, rule="accumulate", compression=codec)


def test_a_worker_that_keeps_nothing_pushes_what_it_has_moved() -> None:
    """So the bits are those without a codec: the same units, and each adds to the same parameters."""
    codec = DeepGradientCompression(sparsity=0.0, momentum=0.0, warmup_updates=0)
    found, counts = train(Inline(5), rule="dynsgd", steps=2, compression=codec)
    expected, dense = train(Inline(5), rule="dynsgd", steps=2)
    assert counts["bytes pushed"] > dense["bytes pushed"]
    assert counts["largest staleness"] == dense["largest staleness"] > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("servers", [1, 3])
def test_what_waits_is_sent_later_and_pieces_of_vectors_at_once(servers: int) -> None:
    """What was sent and what waits is what there was, shard by shard; a matrix cut anywhere is a matrix."""
    made, parameters = layout(servers, DeepGradientCompression(sparsity=0.75, momentum=0.0, warmup_updates=0))
    for shard, pieces in enumerate(made.pieces):
        codec: Any = copy.deepcopy(made.codec)
        rows = np.random.default_rng(shard).normal(size=(4, np.diff(made.bounds)[shard]))
        sent = np.concatenate(
            [made.decode(made.encode(codec, row[None], shard), shard, "float64") for row in rows]
        )
        waiting = codec.state()["residual"]
        matrices = {str(i) for i, piece in enumerate(pieces) if parameters[piece.parameter].ndim > 1}
        assert waiting.keys() == {
            name for name in matrices if pieces[int(name)].stop - pieces[int(name)].start > 1
        }
        for index, piece in enumerate(pieces):
            rest = waiting.get(str(index), torch.zeros(())).numpy()
            total = sent[:, piece.there].sum(0) + rest
            np.testing.assert_allclose(total, rows[:, piece.there].sum(0), rtol=EXACT, atol=EXACT)
            assert (sent[0, piece.there] == 0).any() == (str(index) in waiting)


@pytest.mark.parametrize(
    "codec", [Cast("bf16"), DeepGradientCompression(warmup_updates=0)], ids=lambda one: one.name
)
def test_bytes_that_are_damaged_are_refused_with_a_reason(codec: Any) -> None:
    """Or taken as other numbers: there is no checksum."""
    made, parameters = layout(1, codec)
    shard = ServerShard(made, 0)
    shard.load(0, made.flat(parameters, 0, "float64"), made.split({}, parameters, 0))
    size, drawn = made.bounds[-1], np.random.default_rng(0)
    part = made.encode(copy.deepcopy(codec), np.ones((1, size)), 0)
    ends = [part[:, :end] for end in range(part.size)]
    others = [np.ones((1, size)), part[0], np.concatenate([part, part], 1), *ends]
    for _ in range(200):
        flipped = part.copy()
        flipped[0, drawn.integers(part.size, size=3)] = drawn.integers(256, size=3)
        others.append(flipped)
    said = [shard.push(0, unit, one) for unit, one in enumerate(others, start=1)]
    assert all(said[: 3 + len(ends)])
    assert {one.partition(" (")[0] for one in said[3:]} <= {
        "",
        NOT_FINITE,
        f"bytes that {codec.name} has not made",
    }
    assert shard.push(0, 0, part) == ""
    before = shard.pull()[1].copy()
    for one in others[: 3 + len(ends)]:
        with pytest.raises(PlanError, match="Expected a push that fits, got"):
            shard.apply(0, one, "accumulate", 1)
    assert np.array_equal(shard.pull()[1], before)


# ---- rows that workers read


class Reader:
    """Reads rows by their number, but not on the driver: what is sent to a worker is a copy."""

    def __init__(self, rows: Any, *, is_driver: bool = True) -> None:
        self.rows, self.is_driver = rows, is_driver

    def __deepcopy__(self, memo: Any) -> "Reader":
        return Reader(self.rows, is_driver=False)

    def __call__(self, numbers: list[int]) -> Any:
        assert not self.is_driver, "rows are read on the driver"
        assert all(isinstance(one, int) for one in numbers)
        return tuple(column[numbers] for column in self.rows)


@pytest.mark.parametrize(
    "options", [{"micro_batch": 4}, {"memory": "2GiB"}, {"micro_batch": 4, "recompute": ["0"]}], ids=str
)
@pytest.mark.parametrize("rule", [None, "accumulate"])
def test_collate_is_called_on_workers_alone(rule: Any, options: dict[str, Any]) -> None:
    def parameters(rows: Any, **more: Any) -> list[Tensor]:
        step = step_of(network(), served(2, 2, rule=rule), **options, **more)
        for _ in range(3):
            assert step(rows).rows == ROWS
        return [p.detach() for p in step.model.parameters()]

    found = parameters([*range(ROWS)], collate=Reader(batch()))
    pairs = zip(found, parameters(batch()), strict=True)
    assert all(relative_error({"": one}, {"": other}) < EXACT for one, other in pairs)


def test_a_trainer_sends_what_the_data_gives_for_a_row() -> None:
    """Numbers, read on workers; samples of a data set are read here. Validation is here, too."""

    def trained(data: Any, collate: Any, validation: Any = None) -> list[Tensor]:
        step = step_of(network(), served(2, 2), micro_batch=4, collate=collate)
        trainer = ab.Trainer(step, data, validation, batch_size=10, progress=False)
        trainer.fit(epochs=2)
        return [p.detach() for p in step.model.parameters()]

    rows = batch()
    dataset = torch.utils.data.TensorDataset(*rows)
    found = trained(range(ROWS), Reader(rows))
    expected = trained(dataset, torch.utils.data.default_collate)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(AssertionError, match="rows are read on the driver"):
        trained(range(ROWS), Reader(rows), range(5))


# ---- devices

SEEN: list[set[str]] = []


def seen(model: nn.Module, micro: Any) -> ab.Total:
    SEEN.append({one.device.type for one in (*micro, *model.parameters())})
    raise InterruptedError


@pytest.mark.parametrize(
    ("device", "expected"), [(None, "cpu"), ("meta", "meta"), (torch.device("meta"), "meta")]
)
@pytest.mark.parametrize("rule", [None, "accumulate"])
def test_model_and_rows_are_on_the_device_of_the_worker(
    device: Any, expected: str, rule: Any, monkeypatch: Any
) -> None:
    """The device without numbers is another one, too."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)  # as for CUDA, in place
    monkeypatch.setattr(fingerprint, "checksum", lambda value: 0)  # which needs numbers
    SEEN.clear()
    step = step_of(network(), served(1, 1, device=device, rule=rule), loss=seen)
    with pytest.raises(InterruptedError):
        step(batch())
    assert [*SEEN] == [{expected}]
    assert {one.device.type for one in step.model.parameters()} == {"cpu"}
    assert {p.device.type for group in step.optimizers[0].param_groups for p in group["params"]} == {"cpu"}


class Asked:
    """Ray as far as actors are started: notes what each is to have."""

    def __init__(self, gpus: int) -> None:
        self.cluster_resources = lambda: {"GPU": gpus} if gpus else {}
        self.asked: list[tuple[type, int]] = []
        self.kill = lambda actor: None

    def remote(self, kind: type) -> Any:
        class Kind:
            @staticmethod
            def options(**options: Any) -> Any:
                self.asked.append((kind, options["num_gpus"]))
                return Kind

            @staticmethod
            def remote(*_: Any) -> object:
                return object()

        return Kind


def test_each_worker_asks_ray_for_a_gpu_and_is_refused_where_there_is_none(monkeypatch: Any) -> None:
    """Ray waits for ever."""
    cluster = RayCluster.__new__(RayCluster)
    ray = Asked(gpus=2)
    vars(cluster).update(_ray=ray, _gpus=1, _actors={})
    cluster.start(ServerShard)
    first = cluster.start(Worker)
    cluster.start(Worker)
    assert ray.asked == [(ServerShard, 0), (Worker, 1), (Worker, 1)]
    with pytest.raises(PlanError, match=r"got 2 for 3 workers\. .*device=.cpu"):
        cluster.start(Worker)
    cluster.kill(first)
    cluster.start(Worker)
    cluster.start(ServerShard)
