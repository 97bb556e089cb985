"""The simulated device's allocator keeps to the rules of CUDA's."""

from typing import Any

import torch

from tests.accelerator.simulated import caching, limited, load, process

MB = 2**20

# Of each line the first number of a name is what is allocated, in MB, or "-" and what is freed.
STEPS = [
    ("a 0.0001", 0.0005, 2, "rounded to 512 bytes, from a segment of 2 MB"),
    ("b 0.0006", 0.0015, 2, "from the same segment"),
    ("c 6", 6.0015, 22, "from a segment of 20 MB"),
    ("d 6", 12.0015, 22, "split off"),
    ("e 6", 18.0015, 22, "the rest is 2 MB"),
    ("f 11", 30.0015, 34, "a segment of its own, of whole 2 MB; a rest of 1 MB is not split off"),
    ("- c", 24.0015, 34, "free, not given back"),
    ("- d", 18.0015, 34, "merged with its neighbour"),
    ("g 11.5", 30.0015, 34, "into the merged 12 MB, of which half a MB is too little to be split off"),
    ("- f", 18.0015, 34, "cached"),
    ("h 13", 32.0015, 36, "at the limit of 36 MB the unused segment is given back first"),
    ("i 3", 32.0015, 36, "out of memory"),
    ("j 1", 33.0015, 36, "from the first segment"),
    ("k 2", 35.0015, 36, "the rest of the second"),
]


def followed() -> list[tuple[str, float, float]]:
    sim, held, found = load(), dict[str, torch.Tensor](), list[tuple[str, float, float]]()
    with caching(), limited(36 * MB):
        for what, _, _, why in STEPS:
            name, size = what.split()
            if name == "-":
                del held[size]
            else:
                try:
                    held[name] = torch.empty(int(float(size) * MB), dtype=torch.uint8, device="sim")
                except torch.OutOfMemoryError:
                    why = "out of memory"
            in_use = round(sim.memory_allocated() / MB, 4)
            found.append((why, in_use, sim.memory_reserved() / MB))
        held.clear()
        sim.empty_cache()
        found.append(("all is given back", sim.memory_allocated(), sim.memory_reserved()))
    return found


def test_segments_are_cached_split_merged_and_given_back_at_the_limit(sim: Any) -> None:
    expected = [(why, allocated, reserved) for _, allocated, reserved, why in STEPS]
    with process() as alone:  # that of other tests holds tensors
        assert alone(followed) == [*expected, ("all is given back", 0, 0)]
