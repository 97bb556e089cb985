"""The bytes of a micro-batch as a function of its rows and their length, fitted to readings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

Size = tuple[int, int]  # rows of a micro-batch, and the length of a row: numbers in it

_ROUNDS = 4  # rounds of reweighting
_PER_COLUMN = 0.003  # price of a term, in the mean relative error
_SURE, _PER_DOUBLING, _MOST_MISFIT = 0.01, 0.04, 0.15
_SEGMENTS = 22 * 2**20  # bytes of one segment of each pool of CUDA's allocator, which may be nearly empty
_PACKED = 1 / 8  # share that tensors of 1 to 10 MB leave empty in its segments of 20 MB; on average 0.115


class Law:
    """A model of bytes: k0 + k1 n + k2 m + k3 m n + k4 m n^2 for m rows of length n, all k >= 0.

    The coefficients have the least absolute relative errors over the readings, found by iteratively
    reweighted least squares (Schlossmacher 1973, "An iterative technique for absolute deviations curve
    fitting"). Of all subsets of terms take the one with the least error plus a small price per term. A size
    that was read is predicted by its readings: the largest, or of three and more the second largest, because
    libraries allocate some buffers only once. A size that used more than a larger one runs other kernels, as
    a single row often does; it is left out of the fit and predicted by itself.
    """

    def __init__(self, readings: Iterable[tuple[Size, Sequence[float]]] = ()) -> None:
        self.readings: dict[Size, list[float]] = {size: [*found] for size, found in readings}
        # Of an allocator with a cache: bytes reserved and not used, by size; their largest share in the bytes
        # of tensors, beyond a segment of each pool; bytes of tensors on the device before a micro-batch.
        self.unused, self.unusable, self.below = dict[Size, int](), 0.0, 0
        self._fitted: tuple[Tensor, float, dict[int, float]] | None = None

    def add(self, size: Size, num_bytes: float, *, unused: int = 0, allocated: int = 0) -> None:
        """Add a reading: the bytes that a micro-batch used; and those reserved beside all allocated ones."""
        self.readings.setdefault(size, []).append(max(1.0, float(num_bytes)))
        self._fitted = None
        if unused:
            self.unused[size] = max(self.unused.get(size, 0), unused)
            self.below = max(self.below, int(allocated - num_bytes))
            self.unusable = max(self.unusable, (unused - _SEGMENTS) / allocated)

    @property
    def largest(self) -> int:
        """Rows times length of the largest size that was read; 0 without readings."""
        return max((rows * length for rows, length in self.readings), default=0)

    @property
    def least(self) -> float:
        """The fewest rows that were read; infinity without readings."""
        return min((rows for rows, _ in self.readings), default=math.inf)

    @property
    def lengths(self) -> set[int]:
        """Lengths that were read."""
        return {length for _, length in self.readings}

    @property
    def misfit(self) -> float:
        """The relative error that nine of ten readings stay below."""
        return self._fit()[1] if self.readings else 0.0

    def __call__(self, size: Size) -> float:
        """Return the bytes expected of a size."""
        if size in self.readings:
            return _typical(self.readings[size])
        rows, length = size
        if rows < self.least:  # the constant part is not known well enough to predict less
            return self((int(self.least), length))
        terms, _, odd = self._fit()
        if rows in odd:
            return odd[rows] * length
        expected = max(float(_columns([size])[0] @ terms), self._beyond(rows, length, odd))
        known = self.lengths
        # The power of the length is not known yet: attention needs its square.
        return expected * length / max(known) if len(known) < 3 and length > max(known) else expected

    def _beyond(self, rows: int, length: int, odd: Mapping[int, float]) -> float:
        """Return the bytes of more rows than were read, on the line through two readings of this length.

        Peaks are the largest of several moments, each a line in the rows, so the last slope is the steepest.
        """
        found = sorted(
            (m, _typical(one)) for (m, n), one in self.readings.items() if n == length and m not in odd
        )
        if not found or rows <= found[-1][0]:
            return 0.0
        most, top = found[-1]
        below = [(top - least) / (most - fewer) for fewer, least in found if 2 * fewer <= most]
        return top + (rows - most) * below[-1] if below else 0.0

    def expected(self, size: Size) -> float:
        """Return the bytes expected of a size, with those that an allocator reserves."""
        return self._reserved(size, self(size))

    def bound(self, size: Size) -> float:
        """Return the bytes to allow for: more, the further a size is from the readings."""
        misfit = doublings = 0.0
        if size not in self.readings:
            doublings = math.log2(max(1.0, size[0] * size[1] / self.largest))
            misfit = min(_MOST_MISFIT, 2 * self.misfit)
        return self._reserved(size, self(size) * (1 + _SURE + misfit + _PER_DOUBLING * doublings))

    def _reserved(self, size: Size, used: float) -> float:
        if size in self.unused or not self.below:
            return used + self.unused.get(size, 0)
        return used + _SEGMENTS + max(_PACKED * used, self.unusable * (self.below + used))

    def _fit(self) -> tuple[Tensor, float, dict[int, float]]:
        """Return coefficients, the 90 % quantile of relative errors, and bytes per length of odd sizes."""
        if self._fitted is None:
            points = [(size, _typical(found)) for size, found in self.readings.items()]
            odd = {
                rows: found / length
                for (rows, length), found in points
                if any(m > rows and n == length and least < found for (m, n), least in points)
            }
            terms, misfit = _fitted([(size, found) for size, found in points if size[0] not in odd])
            self._fitted = terms, misfit, odd
        return self._fitted


def _typical(found: Sequence[float]) -> float:
    return max(found) if len(found) < 3 else sorted(found)[-2]


def _columns(sizes: Sequence[Size]) -> Tensor:
    m, n = torch.tensor(sizes, dtype=torch.float64).unbind(1)
    return torch.stack([torch.ones_like(m), n, m, m * n, m * n * n], dim=1)


def _fitted(points: Sequence[tuple[Size, float]]) -> tuple[Tensor, float]:
    sizes, found = [size for size, _ in points], [value for _, value in points]
    # The product is always a term; the others only if the readings can tell them apart.
    rows, lengths = len({m for m, _ in sizes}), len({n for _, n in sizes})
    usable = [3] + [0] * (rows > 1) + [4] * (lengths > 1) + [2] * (lengths > 1 and len(points) > 3)
    usable += [1] * (lengths > 2 and len(points) > 4)
    most = max(1, len(points) - (lengths > 2))
    subsets = [one for count in range(1, most + 1) for one in combinations(usable, count)]
    masks = torch.zeros(len(subsets), 5, dtype=torch.float64)
    for mask, subset in zip(masks, subsets, strict=True):
        mask[list(subset)] = 1
    relative = _columns(sizes) / torch.tensor(found, dtype=torch.float64)[:, None]
    scale = relative.abs().amax(0)
    system = relative / scale * masks[:, None]  # all subsets at once
    weights = torch.ones(len(subsets), len(points), 1, dtype=torch.float64)
    terms = errors = weights
    for _ in range(_ROUNDS):
        terms = torch.linalg.lstsq(system * weights, weights, driver="gelsd").solution
        errors = (system @ terms - 1).abs()
        weights = errors.clamp(min=0.005).rsqrt()
    scores = errors.mean((1, 2)) + _PER_COLUMN * masks.sum(1)
    scores[terms.amin((1, 2)) < -1e-9] = math.inf
    best = int(scores.argmin())
    ordered = errors[best].flatten().sort().values
    return terms[best].flatten() * masks[best] / scale, float(ordered[math.ceil(0.9 * len(points)) - 1])
