"""`admm`: asynchronous consensus ADMM. Replicas solve their own problem, tied to a common solution by multipliers.

Keeps       on a convex problem, with multipliers of any length, the common weights z go to its solution. z is the mean
            of what each replica that takes part last sent; it is what is tested and saved.
Gives up    replicas differ from z (measured as `spread`). By random batches of one data set multipliers learn little
            but noise, which drives replicas apart: they are kept short (`dual_limit`).
Costs       every `period` steps a copy of the weights each way; in each replica four more copies of the weights
            (multipliers, z, what is sent, and by how much z and multipliers pull), at the servers, or in shared memory,
            one for each replica.
Failure     a replica that dies or freezes no longer counts, and nobody waits for it; what it did since its last
            push is lost with it, though its batches count. A server that dies ends the run. In shared memory a replica
            that is killed inside its own push leaves z half renewed until the next push.

Replica i takes steps on f_i(x) + <u, x - z> + rho/2 |x - z|^2; then u += rho (x - z), it sends x + u / rho, and gets
z (after Zhang & Kwok 2014).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchanges import Holding
from shoal.exchanging.base import Kind, OwnWeights, distance, steps_apart
from shoal.exchanging.downpour import SPREAD_EVERY, Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.options import place_of_weights
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.server import CONSENSUS, ShardClient
from shoal.exchanging.servers.shard import copy_all
from shoal.exchanging.servers.slices import Slice


class Options(Kind):
    """Asynchronous consensus ADMM: replicas solve their own problem, tied to a common solution by multipliers."""

    name = "admm"
    keeps_own = True
    counts_received = True
    registers = True

    rho: float = Field(default=0.5, gt=0)
    """How strongly a replica is tied to the common solution."""
    period: int = Field(default=4, gt=0)
    """Steps that a replica takes on its own problem between two pushes. Unless given, 4 with two replicas and 2 with
    more."""
    least: int = Field(default=1, gt=0)
    """Replicas that must have sent something for the common solution to be renewed (S). 1: nobody waits."""
    delay: int = Field(default=0, ge=0)
    """Renewals after which one that has not sent anything is waited for (tau). 0: never."""
    dual_limit: float = Field(default=0.02, ge=0)
    """Largest length of the multipliers of a tensor, as a share of rho times the length of its weights. 0 has none:
    the penalty method, without multipliers. Replicas whose data differ need longer ones: 1 or more."""
    servers: Literal["auto", "direct", "processes"] = "auto"
    """Where the common solution is: direct (shared memory of one host, where nobody can wait), or in processes of its
    own."""
    shards: int | None = Field(default=None, gt=0)
    """Into how many parts the weights are cut, each with a lock, or a server, of its own; large tensors are split."""

    @model_validator(mode="after")
    def _check_waiting(self) -> Self:
        if self.servers == "direct" and self._waits:
            raise ConfigError(
                f"least = {self.least} and delay = {self.delay} with servers = 'direct', where nobody waits.",
                "Give servers=processes, or least=1 and delay=0.",
            )
        return self

    @property
    def _waits(self) -> bool:
        """Whether a push may wait for those of others."""
        return self.least > 1 or self.delay > 0

    @property
    def own_in_words(self) -> str:
        """Their own solutions."""
        return "weights and multipliers of their own"

    def among(self, replicas: int) -> Self:
        """Replicas send more often the more of them there are, unless it was said how often."""
        return self.unless_given("period", steps_apart(replicas))

    def holding(self, replicas: int, *, one_host: bool, weight_bytes: int) -> Holding:
        """With what each replica sent last."""
        servers = "processes" if self._waits else self.servers
        needed = (1 + replicas) * weight_bytes
        return place_of_weights(servers, self.shards, replicas, one_host=one_host, needed=needed)

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int:  # noqa: ARG002
        """A copy of the weights each way, every `period` steps."""
        return 0 if in_memory else round(2 * weights / self.period)

    def join(self, replica: Replica, seat: Seat, number: int) -> "Admm":
        """Servers that keep the mean of what replicas sent last."""
        terms = {"rule": CONSENSUS, "wanted": self.least, "delay": self.delay}
        return Admm(replica, reach_shards(replica, seat, number, terms, self.shards), self, turn=number)


class Admm(OwnWeights, Downpour):
    """One replica, its multipliers, and the common solution as it last received it."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        options: Options,
        *,
        turn: int,
    ) -> None:
        super().__init__(replica, shards, rule=CONSENSUS, server_momentum=0.0, push_every=1, fetch_every=1, turn=turn)
        self._rho, self._period, self._limit = options.rho, options.period, options.dual_limit
        self._common: list[Tensor] = []
        self._duals: list[Tensor] = []
        self._message: list[Tensor] = []
        self._pull: list[Tensor] = []
        """u - rho z, which every step adds to its gradient beside rho x; it changes with them alone."""

    def begin(self, *, first: bool) -> None:
        super().begin(first=first)
        weights = self.replica.weights
        self._common = [weight.clone() for weight in weights]
        self._duals, self._message, self._pull = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
        self._note_pull()

    def step(self, rate: float | None) -> bool:
        self.tally.steps += 1
        self._count += 1
        if gradients := self.replica.gradients():
            torch._foreach_add_(gradients, self._pull)
            torch._foreach_add_(gradients, self.replica.weights, alpha=self._rho)
        self.replica.tell_gradients()
        self._own_step(rate)
        if self._count % self._period == 0:
            self._agree()
        return True

    def _agree(self) -> None:
        """Update the multipliers, send, and receive the common solution."""
        weights = self.replica.weights
        if weights:
            torch._foreach_add_(self._duals, weights, alpha=self._rho)
            torch._foreach_sub_(self._duals, self._common, alpha=self._rho)
            self._shorten_duals()
            copy_all(self._message, weights)
            torch._foreach_add_(self._message, self._duals, alpha=1 / self._rho)
        self._push_and_fetch(self._message, 1.0, into=self._common)
        self._note_pull()
        self._fetch_count += 1
        if self._fetch_count % SPREAD_EVERY == 0:
            self.tally.spread = distance(weights, self._common)

    def _note_pull(self) -> None:
        """After multipliers or z changed."""
        if self._pull:
            copy_all(self._pull, self._duals)
            torch._foreach_sub_(self._pull, self._common, alpha=self._rho)

    def _shorten_duals(self) -> None:
        """Bring multipliers that are longer than `dual_limit` allows down to that length."""
        lengths = torch.stack([*torch._foreach_norm(self._duals), *torch._foreach_norm(self.replica.weights)]).tolist()
        count = len(self._duals)
        factors = [
            min(1.0, self._limit * self._rho * weight / length) if length else 1.0
            for length, weight in zip(lengths[:count], lengths[count:], strict=True)
        ]
        torch._foreach_mul_(self._duals, factors)

    def _copy_now_and_then(self) -> list[Tensor] | None:
        """Nothing to measure here: what comes back does not replace this replica's weights (see `_agree`)."""
        return None

    def own_state(self) -> dict[str, Tensor]:
        duals = {f"dual/{name}": dual for name, dual in zip(self.replica.names, self._duals, strict=True)}
        return {**super().own_state(), **duals}

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        super().put_own_state({name: value for name, value in state.items() if not name.startswith("dual/")})
        for name, dual in zip(self.replica.names, self._duals, strict=True):
            if f"dual/{name}" not in state:
                raise ValueError(f"there are no multipliers of {name}")
            dual.copy_(state[f"dual/{name}"])
        self._note_pull()
