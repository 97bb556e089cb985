"""What other libraries need besides: each file knows one of them, and imports none."""
