"""A GAN: the generator learns through the discriminator, each a parallel network of its own.

torchrun --nproc-per-node 2 examples/gan.py spatial
"""

import torch
from ranks import digits, finish, mine, parallel, report
from torch import nn
from torch.nn import functional as F

BATCH = 8

torch.manual_seed(0)
images, _ = digits(BATCH)
maker = nn.Sequential(
    nn.ConvTranspose2d(8, 16, 7), nn.BatchNorm2d(16), nn.ReLU(),
    nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1), nn.Tanh(),
)  # fmt: skip
judge = nn.Sequential(
    nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
    nn.Conv2d(8, 16, 4, stride=2, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1),
)  # fmt: skip
generator = parallel(maker, (BATCH, 8, 1, 1))
discriminator = parallel(judge, (BATCH, 1, 28, 28))
makes = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
judges = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))

real, noise = mine(images), torch.Generator().manual_seed(1)
ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
for step in range(4):
    made = generator(mine(torch.randn(BATCH, 8, 1, 1, generator=noise)))
    judges.zero_grad()
    judged = F.binary_cross_entropy_with_logits(discriminator(real), ones)
    judged = judged + F.binary_cross_entropy_with_logits(discriminator(made.detach()), zeros)
    torch.autograd.backward(judged)
    judges.step()
    makes.zero_grad()
    fooled = F.binary_cross_entropy_with_logits(discriminator(made), ones)
    torch.autograd.backward(fooled)
    makes.step()
    report(step, judged, fooled)
finish()
