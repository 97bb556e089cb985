"""Three tasks of accelerate: gradient before clipping and mean loss, alone and with ab.BatchLoss."""

from collections.abc import Iterator
from statistics import fmean

from anybatch.testing import relative_error
from benchmarks.homes import Row
from tests.homes.accelerates import Loop, accelerator, batches
from tests.homes.tasks import LOSSES, ROWS


def measured() -> Iterator[Row]:
    """Yield a row for each task."""
    for task in LOSSES:
        whole = Loop(task, accelerator(), is_ours=False).run(batches(task))
        host = accelerator(gradient_accumulation_steps=4)
        alone = Loop(task, host, is_ours=False).run(batches(task, ROWS // 4))
        home = Loop(task, accelerator(), is_ours=True).run(batches(task))
        yield Row(
            host="accelerate",
            task=task,
            alone=relative_error(alone.gradients[0], whole.gradients[0]),
            home=relative_error(home.gradients[0], whole.gradients[0]),
            losses=(fmean(whole.losses), fmean(alone.losses), fmean(home.losses)),
        )
