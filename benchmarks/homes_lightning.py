"""Three tasks of Lightning's Trainer: gradient and logged loss, alone and with WholeBatchCallback."""

from collections.abc import Iterator

from anybatch.testing import relative_error
from benchmarks.homes import Row
from tests.homes.lightnings import Module, cutting, fit
from tests.homes.tasks import LOSSES, ROWS


def measured() -> Iterator[Row]:
    """Yield a row for each task."""
    for task in LOSSES:
        whole, alone, home = Module(task), Module(task), Module(task)
        logged = (
            fit(whole).logger.values("loss_epoch")[0],
            fit(alone, rows=ROWS // 4, accumulate_grad_batches=4).logger.values("loss_epoch")[0],
            fit(home, cutting(task)).logger.values("loss_epoch")[0],
        )
        yield Row(
            host="Lightning",
            task=task,
            alone=relative_error(alone.gradients[0], whole.gradients[0]),
            home=relative_error(home.gradients[0], whole.gradients[0]),
            losses=logged,
        )
