"""Pictures of what happens in a step; the only place that draws."""
