"""Memory of a step: the ledger, the meter that fills it, fake tensors, devices."""

from anybatch.memory.device import (
    CARDS_BY_NAME as CARDS_BY_NAME,
    Device as Device,
    find_device as find_device,
    parse_memory as parse_memory,
    room_of as room_of,
)
from anybatch.memory.fake import (
    FakeMode as FakeMode,
    Fakes as Fakes,
    drop_left_fakes as drop_left_fakes,
    replaced_by_fakes as replaced_by_fakes,
    sparse_refused as sparse_refused,
    undisturbed as undisturbed,
)
from anybatch.memory.ledger import OWNERS as OWNERS, Ledger as Ledger
from anybatch.memory.meter import Meter as Meter
from anybatch.memory.reading import Following as Following, MemoryReading as MemoryReading
from anybatch.memory.recording import Recording as Recording, continued as continued
