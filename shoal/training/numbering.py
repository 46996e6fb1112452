"""How the samples of a run make batches with numbers, in which a checkpoint says what is done. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from shoal.config import TrainConfig


@dataclass(frozen=True)
class Done:
    """Which batches of a run are done, by number: all before `handed` but those that are to be done again."""

    handed: int
    again: tuple[int, ...] = ()

    @property
    def counted(self) -> int:
        """How many."""
        return self.handed - len(self.again)


def samples_per_number(config: TrainConfig) -> int:
    """Samples of one batch as a run counts them: of all replicas where they share it, else of one replica."""
    options = config.exchange_settings()
    batch = config.batch if options is None or options.same_batch else config.replica_batch
    return batch * config.accumulate


@dataclass(frozen=True)
class Numbering:
    """Batches of `size` samples each, and at the end of an epoch of `samples` one of what remains, if anything does."""

    size: int
    samples: int

    @classmethod
    def of(cls, config: TrainConfig, train_samples: int) -> Self:
        """As a run counts; what is too little for a step of all is left out of an epoch, unless it is kept."""
        whole = train_samples // config.samples_per_step * config.samples_per_step
        return cls(samples_per_number(config), train_samples if config.last_batch == "keep" else whole)

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch.

        >>> Numbering(size=4, samples=10).per_epoch
        3
        """
        return -(-self.samples // self.size)

    def before(self, number: int) -> int:
        """Samples of all batches before this one.

        >>> [Numbering(size=4, samples=10).before(number) for number in range(5)]
        [0, 4, 8, 10, 14]
        """
        epoch, step = divmod(number, self.per_epoch)
        return epoch * self.samples + step * self.size

    def of_batch(self, number: int) -> int:
        """Samples of one batch."""
        return self.before(number + 1) - self.before(number)

    def at(self, sample: int) -> int:
        """The batch that has the sample at this place of the order: all before it end there at the latest."""
        epoch, place = divmod(sample, self.samples)
        return epoch * self.per_epoch + place // self.size

    def of_done(self, done: Done) -> int:
        """Samples of all batches that are done."""
        return self.before(done.handed) - sum(map(self.of_batch, done.again))

    def sharing(self, number: int, other: "Numbering") -> Iterator[int]:
        """The batches of `other` that have a sample of this one."""
        return iter(range(other.at(self.before(number)), other.at(self.before(number + 1) - 1) + 1))
