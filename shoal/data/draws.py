"""Random numbers that are a pure function of (seed, epoch, purpose), on every machine and rank.

Raw Philox words are used rather than numpy's distributions: the words are fixed by the algorithm, whereas a
numpy release may change how it shuffles. A run can so be resumed on a machine with another numpy.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ConfigError


class Purpose(IntEnum):
    """What the numbers are for; two purposes never share a number."""

    ORDER = 0
    AUGMENT = 1
    SYNTHETIC = 2


def words(count: int, *, seed: int, epoch: int, purpose: Purpose) -> NDArray[np.uint64]:
    """The first `count` words of the stream. A longer draw begins with every shorter one."""
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed {seed} is out of range.", "Give a seed from 0 to 2**64 - 1.")
    key = np.array([seed, epoch], dtype=np.uint64)  # numpy would take a list with a large seed for floats
    stream = np.random.Philox(key=key, counter=[0, 0, 0, int(purpose)])
    raw: NDArray[np.uint64] = stream.random_raw(count)
    return raw


def below(raw: NDArray[np.uint64], bound: int) -> NDArray[np.int64]:
    """Map words to 0 .. bound - 1, evenly (the bias is below bound / 2**32).

    >>> below(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64), 10).tolist()
    [0, 5, 9]
    """
    high = raw >> np.uint64(32)
    return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)
