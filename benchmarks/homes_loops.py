"""Three tasks of accelerate and Lightning: gradient before clipping and mean loss, alone and with ours."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from anybatch.testing import relative_error
from benchmarks.homes import Row
from tests.homes.tasks import HOSTS, LOSSES


def measured() -> Iterator[Row]:
    """Yield a row for each host and task."""
    for host, module in HOSTS.items():
        for task in LOSSES if find_spec(host) else ():
            train = import_module(module).train
            whole, alone, home = train(task), train(task, parts=4), train(task, is_cut=True)
            yield Row(
                host=host,
                task=task,
                alone=relative_error(alone.gradients[0], whole.gradients[0]),
                home=relative_error(home.gradients[0], whole.gradients[0]),
                losses=(whole.losses[-1], alone.losses[-1], home.losses[-1]),
            )
