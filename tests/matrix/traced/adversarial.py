"""Two networks against each other: noise from a generator of the device, an average of the weights, a penalty."""

import copy

import numpy as np
import torch
from torch import nn

device = torch.device("cuda")
noise = torch.Generator(device=device).manual_seed(0)
order = torch.Generator().manual_seed(0)
real = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))


def initialise(module):
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0.0, 0.02)
        module.bias.data.fill_(0)


maker = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 4)).to(device).apply(initialise)
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).apply(initialise).to(device)
average = copy.deepcopy(maker).requires_grad_(False)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=2e-4)
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(8, 1, device=device), torch.zeros(8, 1, device=device)
margin = torch.tensor(0.5)  # on the CPU, which is allowed: it has no dimensions

for _ in range(2):
    batch = real[torch.randperm(len(real), generator=order)[:8]].to(device)
    made = maker(torch.randn(8, 3, generator=noise, device=device))
    mixed = (batch + (made.detach() - batch) * torch.rand(8, 1, device=device)).requires_grad_()
    slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
    critic_loss = criterion(critic(batch), ones) + criterion(critic(made.detach()), zeros)
    critic_loss = critic_loss + ((slope.norm(dim=1) - margin) ** 2).mean()
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    maker_loss = criterion(critic(made), ones)
    maker_optimizer.zero_grad()
    maker_loss.backward()
    maker_optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), maker.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    print(critic_loss.tolist(), maker_loss.detach().cpu().numpy())  # SYNC
