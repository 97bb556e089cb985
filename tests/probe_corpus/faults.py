"""All planted faults: each gives another gradient when its batch is cut, or when its padding changes."""

from tests.probe_corpus import fault_losses, fault_meetings, fault_padding, fault_rows
from tests.probe_corpus.case import Make

FAULTS: list[Make] = [
    *fault_losses.FAULTS,
    *fault_meetings.FAULTS,
    *fault_rows.FAULTS,
    *fault_padding.FAULTS,
]
