"""What if the links were faster, the devices slower, or more of them: a cluster and its ranks, changed."""

from dataclasses import dataclass, fields

from shoal.cluster import Cluster
from shoal.errors import InputError, suggestion

_HELP = "Write NAME=FACTORx or devices=N, with commas between: bandwidth=2x,latency=0.5x,compute=2x,devices=64."


@dataclass(frozen=True)
class Change:
    """Factors on what a cluster has; 1 leaves it as it is."""

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    devices: int | None = None

    def __str__(self) -> str:
        """As it is written."""
        factors = [f"{name}={value:g}x" for name in FACTORS if (value := getattr(self, name)) != 1]
        return ",".join([*factors, *([] if self.devices is None else [f"devices={self.devices}"])]) or "as it is"

    def of(self, cluster: Cluster, ranks: int) -> Cluster:
        """The first ranks of a cluster, its links changed; where it has fewer, more hosts like its own."""
        resized = cluster.resized(self.devices or ranks)
        levels = tuple(
            level.model_copy(
                update={
                    "bandwidth": level.bandwidth * self.bandwidth,
                    "sum_bandwidth": None if level.sum_bandwidth is None else level.sum_bandwidth * self.bandwidth,
                    "latency": level.latency * self.latency,
                    "sum_latency": None if level.sum_latency is None else level.sum_latency * self.latency,
                }
            )
            for level in resized.levels
        )
        return resized.model_copy(update={"levels": levels})


FACTORS = tuple(item.name for item in fields(Change) if item.name != "devices")


def parse_change(text: str) -> Change:
    """Read `bandwidth=2x,devices=64`; anything else is an `InputError`.

    >>> str(parse_change("bandwidth=2x,devices=64"))
    'bandwidth=2x,devices=64'
    """
    values: dict[str, float | int] = {}
    for term in text.split(","):
        name, _, value = (part.strip() for part in term.partition("="))
        if name not in (*FACTORS, "devices"):
            raise InputError(f"what if {term!r}: {name!r} cannot be changed.", suggestion(name, (*FACTORS, "devices")))
        if name in values:
            raise InputError(f"what if {text!r}: {name} stands twice.", "Ask one question at a time.")
        try:
            number = int(value) if name == "devices" else float(value.removesuffix("x"))
        except ValueError:
            number = 0
        if not 0 < number < float("inf") or (name != "devices" and not value.endswith("x")):
            raise InputError(
                f"what if {term!r}: {value!r} is not a {'number' if name == 'devices' else 'factor'}.", _HELP
            )
        values[name] = number
    return Change(**values)  # type: ignore[arg-type]
