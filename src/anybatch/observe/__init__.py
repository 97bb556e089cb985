"""Pictures of what happens in a step; the only place that draws."""

from anybatch.observe import figure, memory

__all__ = ["figure", "memory"]
