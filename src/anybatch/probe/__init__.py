"""The tools of the self-test: passes that can be compared, and what finds the place where they part."""
