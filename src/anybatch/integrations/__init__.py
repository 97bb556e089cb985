"""Special cases for other libraries: one file for each, which does not import it."""

from anybatch.integrations.transformers import (
    ROUTER_ADVICE,
    RouterLoss,
    WholeRouterLoss,
    homes,
    is_layer,
    recomputes_itself,
    recorded,
    wants_router_loss,
    with_empty_cache,
    with_own_cache,
)

__all__ = [
    "ROUTER_ADVICE",
    "RouterLoss",
    "WholeRouterLoss",
    "homes",
    "is_layer",
    "recomputes_itself",
    "recorded",
    "wants_router_loss",
    "with_empty_cache",
    "with_own_cache",
]
