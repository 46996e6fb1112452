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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.exchanging.downpour import Downpour
from shoal.exchanging.held import Push
from shoal.exchanging.sparse import Remainder, Selector


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
        if self._local:  # the replica's own optimizer needs them as they are
            gradients = [gradient.clone() for gradient in gradients]
        if self._own_decay and gradients:
            torch._foreach_add_(gradients, self.replica.weights, alpha=self._own_decay)
        if not self._own_momentum or not gradients:
            return gradients
        if not self._momenta:
            # Where the optimizer's own is not used, it is kept there, so that a checkpoint has it.
            own = self.replica.remembered("momentum_buffer")
            self._momenta = [torch.zeros_like(one) for one in own] if self._local else own
        torch._foreach_mul_(self._momenta, self._own_momentum)
        torch._foreach_add_(self._momenta, gradients)
        # Servers may change what they get; what is selected from it is a copy already.
        return self._momenta if self._remainders is not None else [one.clone() for one in self._momenta]

    def _gives_weights(self, number: int) -> bool:
        return self._remainders is None and super()._gives_weights(number)

    @property
    def _takes_change(self) -> bool:
        """Whether what is pushed is selected from weights and what they were, without a tensor for the difference."""
        return self._rule == "add" and any(one.selector.residual for one in self._remainders or ())

    def _own_values(self) -> list[Tensor]:
        return self.replica.weights if self._takes_change else super()._own_values()

    def _first_push(self, number: int, values: Sequence[Tensor], rate: float) -> Push:
        if self._remainders is None:
            return super()._first_push(number, values, rate)
        remainder = self._remainders[number]
        taken = (
            remainder.take_change(values, self._mark_parts[number]) if self._takes_change else remainder.take(values)
        )
        return Push([one.on_host() for one in taken], self._versions[number], rate)
