"""A strategy for Lightning: `Trainer(strategy=ShoalStrategy((32, 3, 224, 224), plan="spatial"))`. Needs `lightning`.

Keeps     one device's losses and weights under any plan; checkpoints and optimizer states are whole, so that they load
          without Shoal, under another plan and on another number of devices.
Failure   `ConfigError` for a LightningModule that has no such network, or parameters outside of it.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from shoal.errors import ConfigError, suggestion
from shoal.execution import ParallelModule
from shoal.finding import parallelize


class ShoalStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning may be absent: then its classes are Any
    """DDP's processes and samplers, but one network of the module is laid over the ranks by a plan.

    example     a tensor, or the shape, of the batch of all ranks together
    plan        as of `shoal.parallelize`
    network     the attribute of the LightningModule that holds the network; the module must have no parameters besides
    settings    further keywords of `shoal.parallelize`, such as `batch_norm="local"` or `recompute=True`

    Each rank's loader gives its share of the batch, as with DDP.
    """

    def __init__(
        self,
        example: Tensor | tuple[int, ...],
        plan: str = "auto",
        *,
        network: str = "model",
        settings: dict[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        self._example, self._plan, self._network, self._settings = example, plan, network, settings or {}

    def setup(self, trainer: Trainer) -> None:
        """Lay the network over the ranks, then make the optimizers; also before a test without training."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._lay(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _lay(self, module: LightningModule) -> None:
        children = dict(module.named_children())
        if self._network not in children:
            raise ConfigError(
                f"{type(module).__name__} has no network {self._network!r}.",
                f"Name it: ShoalStrategy(..., network=...). {suggestion(self._network, children)}",
            )
        inside = f"{self._network}."
        if outside := [name for name, _ in module.named_parameters() if not name.startswith(inside)]:
            raise ConfigError(
                f"{type(module).__name__} has parameters outside of its network {self._network!r}: {outside[0]}.",
                "Move them into the network: only that is kept alike on all ranks.",
            )
        if not isinstance(children[self._network], ParallelModule):  # as it is in a test after training
            laid = parallelize(children[self._network], self._example, plan=self._plan, **self._settings)
            setattr(module, self._network, laid)
