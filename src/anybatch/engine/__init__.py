"""The step itself: plan, task, gradients, the loop and the update. Read window.py first."""

from anybatch.engine.gradients import (
    Apart as Apart,
    Gradient as Gradient,
    accumulation_dtype as accumulation_dtype,
    finish as finish,
    multiply as multiply,
)
from anybatch.engine.part import Part as Part
from anybatch.engine.plan import FLOAT32 as FLOAT32, Plan as Plan, check_micro_batch as check_micro_batch
from anybatch.engine.recover import Restart as Restart
from anybatch.engine.strategy import Agreed as Agreed, Strategy as Strategy
from anybatch.engine.sums import Sums as Sums
from anybatch.engine.task import (
    Progress as Progress,
    Reader as Reader,
    Signature as Signature,
    Task as Task,
    admit as admit,
    check_parts as check_parts,
    context as context,
    gather as gather,
    is_due as is_due,
    refuse_hooks as refuse_hooks,
)
from anybatch.engine.update import (
    TornUpdateError as TornUpdateError,
    clip as clip,
    learning_rate_of as learning_rate_of,
    norm_of as norm_of,
    owned as owned,
    step_optimizers as step_optimizers,
)
from anybatch.engine.window import (
    Window as Window,
    accompany as accompany,
    carry_out as carry_out,
    clear as clear,
    no_room_for_update as no_room_for_update,
    snapshot as snapshot,
)
