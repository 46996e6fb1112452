"""A synchronised batch norm of the plain kind, on any device: SyncBatchNorm itself refuses CPU tensors."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


class PlainSyncBatchNorm(nn.BatchNorm2d):
    """Sums and sums of squares over all ranks, then the usual formula, differentiated by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        """As on one device with the whole batch."""
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        sums = torch.cat([x.sum([0, 2, 3]), x.square().sum([0, 2, 3])])
        sums = all_reduce(sums)  # type: ignore[no-untyped-call]
        mean, mean_of_squares = (sums / count).chunk(2)
        variance = mean_of_squares - mean.square()
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        gain = self.weight * (variance + self.eps).rsqrt()
        out: Tensor = x * gain[:, None, None] + (self.bias - mean * gain)[:, None, None]
        return out


def with_plain_sync(model: nn.Module) -> nn.Module:
    """The same network with every batch norm synchronised."""
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm2d):
            ours = PlainSyncBatchNorm(child.num_features, child.eps, child.momentum or 0.1)
            ours.load_state_dict(child.state_dict())
            setattr(model, name, ours)
        else:
            with_plain_sync(child)
    return model
