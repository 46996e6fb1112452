"""Compression written down a second time, slowly and without torch's help: what the codecs are held against."""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def sent(name: str, values: Values, density: float) -> Values:
    """What arrives of flat float64 values."""
    match name:
        case "bf16":
            return half(values)
        case "topk":
            return largest(values, density)
        case "int8" | "sign":
            blocks = [values[start : start + 512] for start in range(0, len(values), 512)]
            return np.concatenate([nearest(one) if name == "int8" else signs(one) for one in blocks] or [values])
    raise AssertionError(name)


def half(values: Values) -> Values:
    """Rounded to bfloat16: the upper half of a float32, to the nearest, to the even one where two are."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def nearest(block: Values) -> Values:
    step = max(abs(block)) / 127
    return np.array([round(one / step) * step for one in block]) if step else block * 0


def signs(block: Values) -> Values:
    mean = sum(abs(block)) / len(block)
    return np.array([mean if one >= 0 else -mean for one in block])


def largest(values: Values, density: float) -> Values:
    count = max(1, round(density * len(values)))
    if len(values) < 1024:
        return values
    kept = np.zeros_like(values)
    for place in sorted(range(len(values)), key=lambda place: -abs(values[place]))[:count]:
        kept[place] = values[place]
    return kept


def mean(name: str, given: list[Values], density: float) -> Values:
    """Over ranks; a sum in bfloat16 is rounded once more for each rank that is added."""
    arrived = [sent(name, values, density) for values in given]
    total = arrived[0]
    for other in arrived[1:]:
        total = half(total + other) if name == "bf16" else total + other
    return total / len(given)
