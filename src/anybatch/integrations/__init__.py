"""What other libraries need besides: each file knows one of them, and imports none."""

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
