"""Parameter servers: the optimizer's state, rows that workers read, workers on another device."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import PlanError, tree
from anybatch.parallel import fingerprint
from anybatch.parallel.on_ray import RayCluster
from anybatch.parallel.server import ServerShard
from anybatch.parallel.worker import Worker
from anybatch.testing import relative_error, tolerance
from tests.parallel.inline import Inline
from tests.parallel.test_server import ROWS, batch, network, served, step_of

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
