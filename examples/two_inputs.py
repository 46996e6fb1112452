"""An encoder-decoder with two inputs, one by name: it fills holes in images, and is told where they are.

torchrun --nproc-per-node 2 examples/two_inputs.py spatial
"""

import torch
from ranks import digits, finish, mine, parallel, report
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 8


class Filler(nn.Module):
    """Encodes image and mask each by itself, decodes both together; returns the image and its features."""

    def __init__(self) -> None:
        super().__init__()
        self.of_image = nn.Conv2d(1, 8, 4, stride=2, padding=1)
        self.of_mask = nn.Conv2d(1, 4, 4, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.decoder = nn.ConvTranspose2d(16 + 12, 1, 4, stride=2, padding=1)

    def forward(self, image: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        first = F.relu(torch.cat([self.of_image(image * mask), self.of_mask(mask)], 1))
        second = self.middle(first)
        filled = self.decoder(torch.cat([first, second], 1))
        return {"filled": torch.where(mask > 0, image, filled), "features": second.mean((2, 3))}


torch.manual_seed(0)
images, _ = digits(BATCH)
masks = torch.ones_like(images)
masks[:, :, 8:18, 10:20] = 0
model = parallel(Filler(), {"image": images, "mask": masks})
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for step in range(4):
    optimizer.zero_grad()
    found = model(mine(images), mask=mine(masks))
    loss = F.mse_loss(found["filled"], mine(images)) + 1e-3 * found["features"].square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    report(step, loss)
finish()
