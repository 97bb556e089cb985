"""Special cases for other libraries: one file for each, which does not import it."""

from anybatch.integrations.accelerate import (
    computes_in_float16 as computes_in_float16,
    unprepared as unprepared,
)
from anybatch.integrations.transformers import (
    ROUTER_ADVICE as ROUTER_ADVICE,
    RouterLoss as RouterLoss,
    WholeRouterLoss as WholeRouterLoss,
    homes as homes,
    is_layer as is_layer,
    recomputes_itself as recomputes_itself,
    recorded as recorded,
    wants_router_loss as wants_router_loss,
    with_empty_cache as with_empty_cache,
    with_own_cache as with_own_cache,
)
