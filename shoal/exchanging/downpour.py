"""`downpour`: asynchronous parameter servers (Dean et al. 2012; Paine et al. 2013 with n_push = n_fetch = n_sync).

Keeps       one replica is plain SGD, bit for bit, at any n_sync (with the rule chosen unless told);
            Adagrad over shards is Adagrad.
Gives up    with several replicas a gradient is computed on weights that others have changed since (staleness,
            measured); shards may be of different versions. The order of updates differs from run to run.
Costs       per push and fetch one copy of the weights each way, to servers or, on one host, to shared memory; beside
            the weights one to three more copies in each replica that takes steps of its own (n_push or n_fetch over 1,
            or rule=add); the rule's state lives in the servers.
Failure     a replica that dies or freezes is missed by nobody; its batch is handed out again. A server that dies ends
            the run, which can be resumed from its last checkpoint.

With `rule=sgd` and `rule=adagrad` servers step on pushed gradients; between pushes a replica takes steps of its own
with its own optimizer and pushes the sum of their gradients (Dean). With `rule=add` the replica's own optimizer makes
all steps, and it pushes how far they took it (Paine).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.exchanging.base import Exchange, distance
from shoal.exchanging.held import Outcome, Push, copy_all, on_host
from shoal.exchanging.replica import Replica
from shoal.exchanging.server import ShardClient
from shoal.exchanging.shards import Slice

SPREAD_EVERY = 50
"""Exchanges from one measurement of the distance to the common weights to the next: it costs a pass over them."""


ALONE = 8
"""Pushes in a row between which nobody came, after which a replica takes itself for the only one; it begins as one."""


class Downpour(Exchange):
    """One replica and its shards, wherever these are."""

    def __init__(
        self,
        replica: Replica,
        shards: Sequence[tuple[Sequence[Slice], ShardClient]],
        *,
        rule: str,
        server_momentum: float,
        push_every: int,
        fetch_every: int,
        turn: int = 0,
        sparse_back: bool = False,
    ) -> None:
        super().__init__(replica)
        self._slices = [slices for slices, _ in shards]
        self._shards = [shard for _, shard in shards]
        self._own_parts = self._cut(replica.weights)
        self._mark_parts: list[list[Tensor]] = []
        """The same of `_mark`."""
        self._rule, self._server_momentum = rule, server_momentum
        self._push_every, self._fetch_every = push_every, fetch_every
        self._local = push_every > 1 or fetch_every > 1 or rule == "add"
        """Whether this replica takes steps of its own between exchanges."""
        self._versions = [0] * len(self._shards)
        self._undisturbed = [ALONE] * len(self._shards)
        """For so many pushes to a shard in a row nobody else came between fetch and push."""
        self._turn = turn
        self._sparse_back = sparse_back
        self._whole = False
        """Whether servers are asked for all weights, also where they would send changes only."""
        self._count = 0
        self._exchanges = 0
        self._traffic = (0, 0)
        self._mark: list[Tensor] = []
        """Weights as of the last push or fetch: what came since is this replica's own."""
        self._sums: list[Tensor] = []
        """Gradients since the last push, where servers want them and several make a push."""
        self._changes: list[Tensor] = []
        """Memory for how far weights came since `_mark`: new memory each time would cost more than the subtraction."""

    def begin(self, *, first: bool) -> None:
        for number, (shard, weights) in enumerate(zip(self._shards, self._cut(self.replica.weights), strict=True)):
            if first:
                state = (
                    []
                    if self._server_state is None
                    else [self._cut(self.replica.remembered(self._server_state))[number]]
                )
                self._versions[number] = shard.begin(on_host(weights), [on_host(kept) for kept in state])
            else:
                self._versions[number] = shard.wait()
        self._exchange(None, None, into=self.replica.weights)
        self.replica.spread()
        if self._local:
            self._mark = [weight.clone() for weight in self.replica.weights]
            self._mark_parts = self._cut(self._mark)
            if self._rule != "add":
                self._sums = [torch.zeros_like(weight) for weight in self.replica.weights]

    @property
    def _server_state(self) -> str | None:
        """Under which name the optimizer remembers what the servers' rule does; None where it has no memory.

        Where replicas step too, their optimizers have a momentum of their own beside it.
        """
        if self._rule == "adagrad":
            return "sum"
        if self._rule == "add" or not self._server_momentum:
            return None
        return "server_momentum" if self._local else "momentum_buffer"

    def step(self, rate: float | None) -> bool | None:
        self.tally.steps += 1
        self._count += 1
        if not self._local:
            applied = self._exchange(self._gradients(), rate, into=self.replica.weights)
            self.replica.spread()
            return applied
        if self._rule != "add" and self._sums:
            torch._foreach_add_(self._sums, self._gradients())
        self._own_step(rate)
        push, fetch = self._count % self._push_every == 0, self._count % self._fetch_every == 0
        done = self._exchange_own(rate, push=push, fetch=fetch) if push or fetch else False
        return done if push else None

    def flush(self) -> bool | None:
        if not self._local or self._count % self._push_every == 0:
            return None
        self._count = 0
        return self._exchange_own(None, push=True, fetch=True)

    def _gradients(self) -> list[Tensor]:
        """What the last backward gives to servers; they may change it."""
        return self.replica.gradients()

    def settle(self) -> None:
        self._whole = True
        self._settle()
        self._whole = False

    def _settle(self) -> None:
        if self._local:
            pending = self._count % self._push_every > 0
            self._exchange_own(None, push=pending, fetch=True)
            self._count = 0
        else:
            self._exchange(None, None, into=self.replica.weights)
            self.replica.spread()
        if self._server_state is not None:
            for shard, kept in zip(self._shards, self._cut(self.replica.remembered(self._server_state)), strict=True):
                _, state = shard.snapshot()
                copy_all(kept, state[0])

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _exchange_own(self, rate: float | None, *, push: bool, fetch: bool) -> bool:
        """Push what this replica did since its last push; fetch, and keep on top what it has not pushed."""
        weights = self.replica.weights
        kept = self._change() if not push and self._count % self._push_every > 0 else []
        # Changes only are changes of what this replica last fetched.
        into, after = (self._mark, weights) if self._sparse_back else (weights, self._mark)
        applied = self._exchange(self._own_values() if push else None, rate, into=into if fetch else None)
        if push and self._sums:
            torch._foreach_zero_(self._sums)
        if fetch:
            copy_all(after, into)
        elif push:
            copy_all(self._mark, weights)
        if kept:
            torch._foreach_add_(weights, kept)
        if fetch:
            self.replica.spread()
        return applied

    def _own_values(self) -> list[Tensor]:
        """What servers are told of the steps since the last push, at whatever rate these were made."""
        return self._change() if self._rule == "add" else self._sums

    def _change(self) -> list[Tensor]:
        """How far this replica came since its last push or fetch."""
        weights = self.replica.weights
        self._changes = self._changes or [torch.empty_like(weight) for weight in weights]
        for change, weight, mark in zip(self._changes, weights, self._mark, strict=True):
            torch.sub(weight, mark, out=change)
        return self._changes

    def _exchange(
        self,
        values: Sequence[Tensor] | None,
        rate: float | None,
        *,
        into: Sequence[Tensor] | None,
        at_least: int = 0,
    ) -> bool:
        """Push `values` and fetch weights `into` these tensors, unless there are none; at all shards at once."""
        rate = self.replica.optimizer.param_groups[0]["lr"] if rate is None else rate
        fetched = [None] * len(self._shards) if into is None else self._cut(into)
        pushed = None if values is None else self._cut(values)
        fetch = into is not None
        before = self._copy_now_and_then(fetch=fetch, push=pushed is not None)
        with self._waiting():
            for number, shard in enumerate(self._shards):
                push = None if pushed is None else self._first_push(number, pushed[number], rate)
                shard.ask(push, fetch=fetch, at_least=at_least, whole=self._whole)
            outcomes = [self._finish(number, pushed, fetched[number], rate) for number in self._turns()]
        if before is not None and into is not None:  # the second for the type checker
            self.tally.spread = distance(before, into)
        return self._note(outcomes) if pushed is not None else True

    def _turns(self) -> Sequence[int]:
        """Shards in an order in which replicas that begin together do not all wait for the same one."""
        count = len(self._shards)
        return [(self._turn + number) % count for number in range(count)]

    def _gives_weights(self, number: int) -> bool:
        return self._rule == "add" and self._undisturbed[number] >= ALONE

    def _first_push(self, number: int, values: Sequence[Tensor], rate: float) -> Push:
        """Whole weights where nobody came between for long: exact, where adding a change to old ones would round."""
        if self._gives_weights(number):
            own = on_host([weight.clone() for weight in self._own_parts[number]])
            return Push(own, self._versions[number], rate, "weights")
        return Push(on_host(values), self._versions[number], rate)

    def _finish(
        self, number: int, pushed: Sequence[Sequence[Tensor]] | None, into: Sequence[Tensor] | None, rate: float
    ) -> Outcome:
        shard = self._shards[number]
        outcome = _answer(shard, into)
        if pushed is not None:
            if not outcome.applied and self._gives_weights(number):
                shard.ask(
                    Push(on_host(pushed[number]), self._versions[number], rate),
                    fetch=into is not None,
                    whole=self._whole,
                )
                outcome = _answer(shard, into)
            self._undisturbed[number] = 0 if outcome.staleness else self._undisturbed[number] + 1
        if into is not None:
            self._versions[number] = outcome.version
        elif outcome.applied:
            self._versions[number] += 1  # this replica's own update, which its next gradient is not behind of
        return outcome

    def _copy_now_and_then(self, *, fetch: bool, push: bool) -> list[Tensor] | None:
        self._exchanges += fetch and push
        due = fetch and push and self._exchanges % SPREAD_EVERY == 0
        return [weight.clone() for weight in self.replica.weights] if due else None

    def _note(self, outcomes: Sequence[Outcome]) -> bool:
        """A push counts as applied if any shard applied it, and is as stale as its stalest part."""
        applied = any(outcome.applied for outcome in outcomes) or not outcomes
        if applied:
            self.tally.updates += 1
            self.tally.staleness[max((outcome.staleness for outcome in outcomes if outcome.applied), default=0)] += 1
        else:
            self.tally.dropped += 1
        traffic = [shard.traffic for shard in self._shards]
        sent, received = sum(one for one, _ in traffic), sum(one for _, one in traffic)
        self.tally.sent_bytes += sent - self._traffic[0]
        self.tally.received_bytes += received - self._traffic[1]
        self._traffic = sent, received
        return applied

    def _cut(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """What each shard holds of these tensors, as views."""
        by_name = dict(zip(self.replica.names, tensors, strict=True))
        return [[by_name[one.name][one.start : one.stop] for one in slices] for slices in self._slices]


def _answer(shard: ShardClient, into: Sequence[Tensor] | None) -> Outcome:
    """Shards live in host memory; a replica's weights may not."""
    if into is None or all(tensor.device.type == "cpu" for tensor in into):
        return shard.answer(into)
    arrived = [torch.empty_like(tensor, device="cpu") for tensor in into]
    outcome = shard.answer(arrived)
    copy_all(into, arrived)
    return outcome
