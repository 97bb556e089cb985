"""Parameter servers: the optimizer's state, rows that workers read, workers on another device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import PlanError, tree
from anybatch.parallel import fingerprint
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import ServerShard
from anybatch.parallel.worker import Worker
from anybatch.testing import relative_error, tolerance
from tests.parallel.inline import Inline
from tests.parallel.test_server import EXACT, ROWS, batch, network, served, step_of

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
def test_collate_is_called_on_workers_alone(options: dict[str, Any]) -> None:
    def parameters(rows: Any, **more: Any) -> list[Tensor]:
        step = step_of(network(), served(2, 2), **options, **more)
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
def test_model_and_rows_are_on_the_device_of_the_worker(device: Any, expected: str, monkeypatch: Any) -> None:
    """The device without numbers is another one, too."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)  # as for CUDA, in place
    monkeypatch.setattr(fingerprint, "checksum", lambda value: 0)  # which needs numbers
    SEEN.clear()
    step = step_of(network(), served(1, 1, device=device), loss=seen)
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
