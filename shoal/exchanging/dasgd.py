"""`dasgd`: asynchronous servers with sparse gradients, momentum and decay with staleness (Chan & Lane 2014).

Keeps       what `downpour` keeps; with sparse and decay off it is `downpour` of the same period, bit for bit: with
            momentum at the worker `rule=add`, at the server `rule=sgd`.
            With `residual` nothing is lost: what was not pushed is added to the next gradient.
Gives up    a replica's weights lag behind the servers' where a change was too small to be sent back.
Costs       a push sends 8 bytes for each of `density` of the elements, and over links a fetch the same for the
            `density_back` that changed most; selecting costs about five passes over the gradient. One more copy of the
            gradient in each replica (residual), one with momentum at the worker, and per replica one in the servers
            (what it has).
Failure     as `downpour`; a replica that is lost takes its residual with it. Of a push that is dropped as too stale
            (`max_staleness`) what was not selected stays in the residual, though its batch is trained on again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.exchanges import Rates
from shoal.exchanging.base import steps_apart
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica, taken_over
from shoal.exchanging.servers.options import Served, asynchronous_rates, momentum_adds_up
from shoal.exchanging.servers.reach import reach_shards
from shoal.exchanging.servers.shard import Push
from shoal.exchanging.servers.sparse import Remainder, Selector

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "shoal": {},
    "paper": {"sparse": "threshold", "momentum_at": "server", "n_sync": 1},
}
"""What options are unless given: those that the class names, or those of Chan & Lane 2014 as we understand them."""


class Options(Served):
    """Asynchronous servers with sparse gradients, momentum and decay with staleness (Chan & Lane 2014).

    With `sparse=none, decay=none` it is plain `downpour`, of `rule=add` with `momentum_at=worker`, else of `rule=sgd`.
    """

    name = "dasgd"
    period = 4

    preset: Literal["shoal", "paper"] = "shoal"
    """What the other options are unless given: shoal (as told of each), or paper, as we understand Chan & Lane 2014, of
    which we could read the abstract alone: every step is pushed (n_sync=1), elements above a fixed threshold
    (sparse=threshold), momentum at the server (momentum_at=server)."""
    sparse: Literal["none", "sampled", "topk", "threshold"] = "sampled"
    """Which elements of each tensor are pushed: the largest (topk: exactly; sampled: above a threshold that is
    estimated from a sample), those above a fixed threshold, or all."""
    density: float = Field(default=0.01, gt=0, le=1)
    """Share of each tensor that sampled and topk push."""
    density_back: float | None = Field(default=None, gt=0, le=1)
    """Share of each tensor that servers send back over links. Unless given four times `density`: what a replica is not
    told makes its next gradients stale, and with as little back as forth accuracy was lost. Servers keep a copy of the
    weights for every replica, to know what it has; with 1 they send all and keep none."""
    threshold: float = Field(default=1e-4, gt=0)
    """Smallest magnitude that `sparse=threshold` pushes."""
    residual: bool = True
    """Keep what was not pushed and add it to the next gradient (Strom 2015), or drop it."""
    momentum_at: Literal["server", "worker"] = "worker"
    """Where the run's momentum is kept. At the server every weight changes with every push; at the worker and with
    n_sync over 1 the replica's own optimizer has it, and pushes how far it came."""
    decay: Literal["none", "exponential", "inverse"] = Field(
        default="exponential",
        description="How a stale gradient is weakened: decay_base ** staleness (Chan & Lane 2014, as Zhang et al. 2016 "
        "tell of it), 1 / staleness (Zhang et al. 2016).",
    )
    decay_base: float = Field(default=0.9, gt=0, le=1)
    """Base of the exponential decay."""

    @property
    def share_back(self) -> float:
        """Share of each tensor that servers send back over links."""
        return self.density_back or min(1.0, 4 * self.density)

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, given: Any) -> Any:
        """Options that were given win over the preset."""
        if not isinstance(given, Mapping) or given.get("preset") not in PRESETS:
            return given
        chosen = dict(PRESETS[given["preset"]])
        if given.get("n_push") or given.get("n_fetch"):
            chosen.pop("n_sync", None)
        return {**chosen, **given}

    @model_validator(mode="after")
    def _check_sparse(self) -> "Options":
        if self.push_every != self.fetch_every:
            raise ConfigError(
                f"dasgd pushes every {self.push_every} and fetches every {self.fetch_every} steps.",
                "Give n_sync: dasgd pushes and fetches in one go.",
            )
        return self

    @property
    def hands_in(self) -> bool:
        """What was not pushed yet, and a momentum of its own."""
        return (self.sparse != "none" and self.residual) or self.momentum_at == "worker"

    def bytes_per_step(self, weights: int, replicas: int, *, in_memory: bool) -> int | None:
        """What is selected depends on the values."""
        if in_memory or self.sparse == "none":
            return super().bytes_per_step(weights, replicas, in_memory=in_memory)
        return None

    def among(self, replicas: int) -> Self:
        """Replicas that step by themselves meet more often the more of them there are, unless it was said how often."""
        return self if self.n_push or self.n_fetch else self.unless_given("n_sync", steps_apart(replicas))

    def own_rates(self, given: Rates, replicas: int) -> Rates:
        """Every replica's gradient, or change, is an update."""
        return asynchronous_rates(given, replicas, at_servers=self.momentum_at == "server")

    def warnings(self, replicas: int, *, lr: float, momentum: float) -> list[str]:
        """Momentum may add up."""
        adds_up = self.rates == "given" and self.momentum_at == "server"
        return momentum_adds_up(replicas, lr, momentum) if adds_up else []

    def taken_over(self, optimizer: Optimizer) -> Mapping[str, float] | None:
        """Momentum and weight decay; nothing where a replica's own optimizer has them over several steps."""
        if self.momentum_at == "worker" and self.push_every > 1:
            return None  # the replica pushes how far its own steps took it
        way_out = "give momentum_at='worker' and n_sync over 1, with which every replica steps by itself"
        return taken_over(optimizer, way_out)

    def join(self, replica: Replica, seat: Seat, number: int) -> "Dasgd":
        """Momentum and weight decay are those of the optimizer, kept where the options say."""
        settings = self.taken_over(replica.optimizer)
        adds = settings is None
        momentum, weight_decay = (0.0, 0.0) if settings is None else settings.values()
        selector = None
        if self.sparse != "none":
            selector = Selector(
                kind=self.sparse, density=self.density, threshold=self.threshold, residual=self.residual
            )
        at_worker = self.momentum_at == "worker"
        own_decay = weight_decay if selector is not None or at_worker else 0.0
        at_server = 0.0 if at_worker else momentum
        on_cpu = all(weight.device.type == "cpu" for weight in replica.weights)
        sparse_back = selector is not None and on_cpu and seat.meeting.shared is None and self.share_back < 1
        back = "sampled" if self.sparse == "threshold" else self.sparse  # a gradient's threshold does not fit weights
        rule = "add" if adds else "sgd"
        terms = {
            "rule": rule,
            "momentum": at_server,
            "weight_decay": weight_decay - own_decay,
            "decay": self.decay,
            "decay_base": self.decay_base,
            "back": {"kind": back, "density": self.share_back} if sparse_back else None,
            "max_staleness": self.max_staleness,
        }
        return Dasgd(
            replica,
            reach_shards(replica, seat, number, terms, self.shards),
            rule=rule,
            server_momentum=at_server,
            push_every=self.push_every,
            fetch_every=self.fetch_every,
            turn=number,
            selector=selector,
            own_momentum=momentum if at_worker else 0.0,
            own_decay=own_decay,
            sparse_back=sparse_back,
            max_staleness=self.max_staleness,
        )


class Dasgd(Downpour):
    """`selector`: which elements are pushed; None pushes all.

    `own_momentum`, `own_decay`: what this replica adds to its gradients itself, where the servers do not.
    """

    def __init__(
        self, *args: Any, selector: Selector | None, own_momentum: float, own_decay: float, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._own_momentum, self._own_decay = own_momentum, own_decay
        self._momenta: list[Tensor] = []
        self._remainders: list[Remainder] | None = None
        if selector is not None:
            self._remainders = [Remainder(selector, weights) for weights in self._cut(self.replica.weights)]

    def _gradients(self) -> list[Tensor]:
        gradients = self.replica.gradients()
        if self._local:  # the replica's own optimizer needs the gradients unchanged
            gradients = [gradient.clone() for gradient in gradients]
        if self._own_decay and gradients:
            torch._foreach_add_(gradients, self.replica.weights, alpha=self._own_decay)
        if not self._own_momentum or not gradients:
            return gradients
        if not self._momenta:
            # Where the optimizer's own is not used, it is kept there, so that a checkpoint has it.
            own = self.replica.remembered("momentum_buffer")
            self._momenta = [torch.zeros_like(momentum) for momentum in own] if self._local else own
        torch._foreach_mul_(self._momenta, self._own_momentum)
        torch._foreach_add_(self._momenta, gradients)
        # Servers may change what they get; what is selected from it is a copy already.
        return self._momenta if self._remainders is not None else [momentum.clone() for momentum in self._momenta]

    @property
    def _remembers(self) -> bool:
        return self._local or bool(self._own_momentum)

    def put_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with it, and with a momentum of its own."""
        super().put_own_state(state)
        self._momenta = []  # they are the optimizer's, which has others now

    def _kept_in_shards(self) -> list[list[Tensor]]:
        if self._remainders is None:
            return super()._kept_in_shards()
        return [remainder.left for remainder in self._remainders]

    def _gives_weights(self, number: int) -> bool:
        return self._remainders is None and super()._gives_weights(number)

    @property
    def _takes_change(self) -> bool:
        """Whether what is pushed is selected from weights and what they were, without a tensor for the difference."""
        return self._rule == "add" and any(remainder.selector.residual for remainder in self._remainders or ())

    def _own_values(self) -> list[Tensor]:
        return self.replica.weights if self._takes_change else super()._own_values()

    def _first_push(self, number: int, values: Sequence[Tensor], rate: float) -> Push:
        if self._remainders is None:
            return super()._first_push(number, values, rate)
        remainder = self._remainders[number]
        taken = (
            remainder.take_change(values, self._mark_parts[number]) if self._takes_change else remainder.take(values)
        )
        return Push([part.on_host() for part in taken], self._versions[number], rate)
