"""Lightning's Trainer with any plan: one argument, strategy=, is Shoal's. Prints the losses of four steps.

pip install lightning
python examples/lightning_script.py spatial
"""

import sys
import warnings
from tempfile import mkdtemp
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from shoal.integrations.lightning import ShoalStrategy

BATCH, STEPS, RANKS = 16, 4, 2


class Digits(lightning.LightningModule):  # type: ignore[misc]  # Lightning may be absent: then its classes are Any
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module = shoal.zoo.resnet18(input=(1, 28, 28), classes=10)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Each rank's share of every batch, as with DDP."""
        every = 4000 // (BATCH * STEPS)
        x, y = shoal.data.load("digits").train.batch(np.arange(BATCH * STEPS, dtype=np.int64) * every)
        samples, ranks = TensorDataset(x.double(), y), self.trainer.world_size
        mine: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
            samples, num_replicas=ranks, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(samples, batch_size=BATCH // ranks, sampler=mine)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)


class Tell(lightning.Callback):  # type: ignore[misc]
    """The mean of all ranks' losses, after every step."""

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss'].item():.12f}", flush=True)


def main(plan: str) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # two cores, and data in memory
    torch.manual_seed(0)
    parallel = plan != "one"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS if parallel else 1,
        strategy=ShoalStrategy((BATCH, 1, 28, 28), plan=plan) if parallel else "auto",
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,  # Lightning's own shuffles; this one has one device's order
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Tell()],
    )
    trainer.fit(Digits())
    path = trainer.strategy.broadcast(f"{mkdtemp()}/whole.ckpt")
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:  # what was saved is whole: it loads without Shoal
        plain = Digits().double()
        plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        print(f"weights {sum(p.abs().sum().item() for p in plain.parameters()):.9f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "spatial")
